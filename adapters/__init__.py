"""Adapters: one module per framework. Importing this package imports none of them."""
