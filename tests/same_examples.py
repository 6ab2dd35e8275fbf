"""hypothesis draws the same examples whichever modules are loaded.

Now and then it draws a number that it has read in the source of a loaded module, so the examples of a test would depend
on the tests that ran before it in the same process.
"""

from __future__ import annotations

from hypothesis.internal.conjecture import providers


def leave_modules_unread() -> None:
    """Draw no such numbers from now on."""
    nothing = providers.Constants()
    providers._get_local_constants = lambda: nothing  # type: ignore[assignment]
    providers.CONSTANTS_CACHE.cache.clear()
