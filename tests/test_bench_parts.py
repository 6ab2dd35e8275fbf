"""The parts of the benchmark: its models, what it makes of samples, growth, the brief table, the profile."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # bench is no part of the installed package

from bench import growth, models, profile  # noqa: E402
from bench.__main__ import SECTIONS  # noqa: E402
from bench.brief import brief  # noqa: E402
from bench.contenders import LAYERS, contenders  # noqa: E402
from bench.context import SMOKE, SMOKE_TCOVS, Run  # noqa: E402
from bench.first import fresh  # noqa: E402
from bench.timing import Clock, cycle, summary  # noqa: E402
from bench.training import factors, weighted  # noqa: E402


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (models.resnet18, 11_173_962),
        (lambda: models.Decoder(12, 768, 12, 50257, 1024), 124_439_808),
        (lambda: models.VisionTransformer(12, 768, 12, 224, 16, 1000), 86_567_656),
    ],
    ids=["resnet18", "gpt2", "vit_b16"],
)
def test_models_have_the_size_they_are_known_for(make, parameters):
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == parameters


def test_the_decoder_sees_no_later_token():
    torch.manual_seed(0)
    model = models.Decoder(2, 16, 4, 11, 6)
    tokens = torch.randint(11, (1, 6))
    changed = tokens.clone()
    changed[0, 4] = (tokens[0, 4] + 1) % 11
    before, after = (model(x).view(6, 11) for x in (tokens, changed))
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4], after[4])


def small_run(device="cpu"):
    device = torch.device(device)
    return Run(device, SMOKE, contenders(), Clock(device), SMOKE_TCOVS)


def test_pairs_have_the_dtypes_that_autocast_gives():
    model = models.Decoder(1, 16, 4, 11, 6)
    x = torch.randint(11, (2, 6))
    pairs = models.layer_pairs(model, LAYERS, x, x.flatten(), autocast=True)
    assert list(pairs) == [name for name, module in model.named_modules() if isinstance(module, LAYERS)]
    h, s = pairs["trunk.0.mlp.2"]
    assert h.dtype is s.dtype is torch.bfloat16
    assert pairs["trunk.0.norm1"][0].dtype is torch.float32  # the shortcut's sum
    h, s = pairs["head"]
    assert h.shape == (2, 6, 16) and s.shape == (2, 6, 11)


def test_factors_of_bfloat16_read_half_the_bytes():
    run = small_run()
    data = factors(run, "fim", run.work, bf16=True)
    assert not run.failures
    assert data["dtypes"] == {"float32": data["bytes"]} and data["bf16"]["bytes"] * 2 == data["bytes"]
    times, half = data["contenders"]["ours"]["device"], data["bf16"]["times"]["device"]
    assert data["bf16"]["of_float32"]["device"] == half["median"] / times["median"]


def test_feed_fills_the_factors_and_leaves_the_gradients():
    (ours,) = [contender for contender in contenders() if contender.key == "ours"]
    stack = models.matrices([(3, 4), (2, 5)], torch.device("cpu"))
    before = [p.grad.clone() for p in stack.parameters()]
    optimizer = ours.make(stack)
    models.feed(stack)
    assert all(torch.equal(p.grad, g) for p, g in zip(stack.parameters(), before))
    optimizer.step()
    assert all(len(F.unique()) > 1 for pair in optimizer.factors().values() for F in pair)


def test_state_is_counted_from_the_traffic():
    assert {c.key: c.state for c in contenders()} == {"ours": 4, "eager": None, "sgd": 4, "adamw": 8}


@pytest.mark.parametrize("parameters", [10**4, 10**5, 10**6, 10**7, 10**8, 10**9, 4 * 10**9])
def test_growth_reaches_the_sizes_it_names(parameters):
    sizes = [rows * columns for rows, columns in growth.shapes(parameters)]
    assert 0.98 * parameters <= sum(sizes) <= parameters
    assert (max(sizes) > 2**31) == (parameters > 3 * 10**9)


@pytest.mark.parametrize("spoiled", [False, True])
def test_step_error_sees_a_wrong_last_entry(spoiled):
    (ours,) = [contender for contender in contenders() if contender.key == "ours"]
    stack = models.matrices([(70, 50)], torch.device("cpu"))
    p, optimizer = next(stack.parameters()), ours.make(stack)
    models.feed(stack)
    optimizer.step()
    step = optimizer.step

    def wrong_step():
        step()
        p.data[-1, -1] *= 1.00001

    if spoiled:
        optimizer.step = wrong_step
    assert (growth.step_error(optimizer, p) > growth.TOLERANCE) == spoiled


def test_growth_leaves_out_what_does_not_fit(monkeypatch):
    run = small_run()
    monkeypatch.setattr(run, "free", lambda: growth.MARGIN + 9 * 9984)  # p and g, or the state of SGD and of ours
    row = growth.by_parameters(run, 10_000)
    assert set(row["contenders"]) == {"ours", "sgd", "adamw"}
    monkeypatch.setattr(run, "free", lambda: growth.MARGIN + 7 * 9984)
    assert set(growth.by_parameters(run, 10_000)["skipped"]) == {"all"}
    monkeypatch.setattr(run, "free", lambda: growth.MARGIN + 7 * 2048)
    row = growth.by_tensors(run, 2)
    assert set(row["contenders"]) == {"ours", "sgd"} and set(row["skipped"]) == {"adamw"}
    assert not run.failures


def test_weighted_is_the_mean_of_a_cycle():
    sampled, unsampled = summary([30.0, 31.0, 32.0]), summary([10.0, 11.0, 12.0, 13.0])
    figure = weighted(sampled, unsampled, 10)
    assert figure["median"] == pytest.approx((31.0 + 9 * 11.5) / 10)
    assert figure["samples"] == 3 and figure["unit"] == "us"
    assert weighted(sampled, unsampled, 1)["p80"] == sampled["p80"]


def test_summary_is_the_order_statistics():
    figure = summary([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    assert figure == {"median": 3.5, "min": 1.0, "p20": 2.0, "p80": 5.0, "samples": 6, "unit": "us"}


def test_cycle_takes_turns():
    made = []
    call = cycle([lambda: made.append("a"), lambda: made.append("b")])
    for _ in range(3):
        call()
    assert made == ["a", "b", "a"]


def test_brief_tells_of_graphs_and_of_the_first_step():
    def took(ms):
        return {"median": ms * 1e3}

    tracks = [("none", None, 1.5), ("ours", 1, 2.5), ("ours", 10, 1.75), ("sgd", None, 1.625)]
    graphs = {"tracks": [{"contender": key, "TCov": TCov, "iteration": took(ms)} for key, TCov, ms in tracks]}
    record = {
        "environment": {"device": "a GPU", "date": "2026-11-30"},
        "conditions": {
            **{"tf32": False, "mode": "full", "model": "a model", "batch": 1, "dtype": "float32"},
            "contenders": {"ours": "Ours", "sgd": "SGD"},
        },
        "sections": {
            "graphs": {"data": graphs},
            "first": {"data": {"cold": {"first": 2.25, "optimizer": 4.0}, "warm": {"first": 0.5}}},
        },
    }
    text = brief(record, "page", [])
    assert "ms: no optimizer 1.50; Ours 1.75, 2.50 (TCov = 10, 1); SGD 1.62." in text
    assert "2.25 s, and 0.50 s" in text


def test_a_fresh_process_names_what_it_imports():
    assert set(fresh("json", "cafin_cupy")["imports"]) == {"json", "cafin_cupy"}
    with pytest.raises(RuntimeError, match="no_such_module"):
        fresh("no_such_module")


NCU = """==PROF== Connected to process 1 (python)
"ID","Process ID","Kernel Name","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"
"""


def printed_by_ncu(*launches):
    """CSV of (kernel, ns, DRAM %) launches."""
    text = NCU
    for number, (kernel, ns, percent) in enumerate(launches):
        for metric, unit, value in (
            ("gpu__time_duration.sum", "ns", f"{ns:,}"),
            ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", percent),
            ("dram__bytes.sum.per_second", "Gbyte/second", "2,000.5"),
            ("launch__registers_per_thread", "register/thread", 32),
            ("sm__warps_active.avg.pct_of_peak_sustained_active", "%", 75),
            ("smsp__something.else", "%", 1),
        ):
            text += f'"{number}","1","{kernel}(Args)","(7, 1, 1)","Command line","{metric}","{unit}","{value}"\n'
    return text + "==PROF== Disconnected\n"


def test_profile_reads_what_ncu_prints():
    sums = [("column_sums", 1000 * k, 10 * k) for k in (1, 2, 3)]
    launches = profile.parse(printed_by_ncu(("update", 4_752_000, 93), *sums))
    assert launches[0] == {
        **{"kernel": "update", "grid": "(7, 1, 1)", "us": 4752.0, "dram_percent": 93.0},
        **{"bytes_per_second": 2000.5e9, "registers": 32.0, "occupancy_percent": 75.0},
    }
    _, columns = profile.summed(launches)
    assert (columns["launches"], columns["us"]) == (3, 6.0)
    assert columns["dram_percent"] == pytest.approx((10 + 2 * 20 + 3 * 30) / 6)
    facts = {"device": "a GPU", "cuda": "13", "torch": "2", "cupy": "14", "date": "today", "commit": None}
    page = profile.render({"environment": facts, "launches": launches})
    assert "| update | 1 | 4,752 | 93% | 2,000 | 32 | 75% |" in page
    assert page.index("| (7, 1, 1) | 3.00 |") < page.index("| (7, 1, 1) | 1.00 |")  # the longest first
    assert profile.parse("==ERROR== ERR_NVGPUCTRPERM\n") == []


def test_profile_without_ncu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert profile.main([]) == 2
    assert "no `ncu` on PATH" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in ("accuracy", "first")])
def test_a_section_on_a_gpu(name):
    run = small_run("cuda:0")
    data = SECTIONS[name](run)
    assert not run.failures, run.failures
    if name == "graphs":
        tracks = {(track["contender"], track["TCov"]) for track in data["tracks"]}
        assert tracks == {("none", None), ("ours", 1), ("ours", 2), ("sgd", None), ("adamw", None)}


def test_precision_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from bench import precision

    monkeypatch.setattr(precision.torch.cuda, "is_available", lambda: False)
    assert precision.main() == 2
    assert capsys.readouterr().err == "bench.precision: needs a GPU, and PyTorch sees none\n"


@pytest.mark.gpu
def test_precision_times_every_kind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from bench import precision

    for name, few in (("STEPS", 2), ("ROUNDS", 1), ("AHEAD", 1000)):
        monkeypatch.setattr(precision, name, few)
    assert precision.main() == 0
    assert capsys.readouterr().out.count("| AdaFisher, ") == len(precision.ROWS)
