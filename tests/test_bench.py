"""The benchmark: its eager baseline against the stored cases and the reference, and the whole command on a CPU."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # bench is no part of the installed package

from bench import growth, report  # noqa: E402
from bench.__main__ import SECTIONS, arguments, plan  # noqa: E402
from bench.accuracy import error  # noqa: E402
from bench.brief import brief  # noqa: E402
from bench.context import SMOKE  # noqa: E402
from bench.eager import Eager, average, layer_moments, layer_sums  # noqa: E402
from bench.environment import stem  # noqa: E402

CASES = ["mlp", "mlp_decoupled", "mlp_l2_tcov3", "small_gradients", "cnn_bn", "cnn_groups", "transformer_mlp"]
TOLERANCE = 1e-5


def load(name):
    with np.load(ROOT / "tests" / "data" / f"{name}.npz") as stored:
        arrays = {key: stored[key] for key in stored.files}
    return json.loads(str(arrays.pop("case"))), arrays


def build(case, arrays, dtype):
    layers = [dict(layer) for layer in case["model"]]
    model = nn.Sequential(*(getattr(nn, layer.pop("type"))(**layer) for layer in layers))
    model.load_state_dict({k[5:]: torch.as_tensor(v) for k, v in arrays.items() if k.startswith("init/")})
    model = model.to(dtype)
    return model, Eager(model, **case["hyperparameters"], decoupled=case["optimizer"] == "AdaFisherW")


def loss_of(case, z, y):
    if case["loss"] == "mse":
        return ((z - y) ** 2).mean() * case.get("loss_scale", 1.0)
    return nn.functional.cross_entropy(z.mean(1) if z.dim() == 3 else z, y) * case.get("loss_scale", 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_eager_agrees_with_the_stored_case(name, dtype):
    case, arrays = load(name)
    model, optimizer = build(case, arrays, dtype)
    vanishing = {  # a convolution's bias before BatchNorm has no gradient but rounding
        f"{i}.bias"
        for i, (layer, after) in enumerate(zip(case["model"], case["model"][1:]))
        if layer["type"] == "Conv2d" and after["type"] == "BatchNorm2d"
    }
    compared = 0

    def check(got, key, absolute=False):
        nonlocal compared
        want = torch.as_tensor(arrays[f"f64/{key}"])
        distance = float((got.double() - want).abs().max()) if absolute else error(got, want)
        assert distance <= TOLERANCE, f"{key}: {distance:.1e}"
        compared += 1

    for t in range(case["steps"]):
        x, y = (torch.as_tensor(arrays[f"{kind}/{t}"]) for kind in "xy")
        optimizer.zero_grad()
        loss_of(case, model(x.to(dtype)), y.to(dtype) if y.is_floating_point() else y).backward()
        optimizer.step()
        for module, (H, S) in optimizer.factors().items():
            if f"f64/H_D/{t}/{module}" in arrays:
                check(H, f"H_D/{t}/{module}")
                check(S, f"S_D/{t}/{module}")
        for key, p in model.named_parameters():
            if f"f64/param/{t}/{key}" in arrays:
                check(p.detach(), f"param/{t}/{key}", key in vanishing)
                check(optimizer.state[p]["exp_avg"], f"exp_avg/{t}/{key}", key in vanishing)
    stored = sum(key.startswith(("f64/H_D", "f64/S_D", "f64/param", "f64/exp_avg")) for key in arrays)
    assert compared == stored


def shaped(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("module", "h", "s"),
    [
        (nn.Linear(5, 3), (4, 7, 5), (4, 7, 3)),
        (nn.Linear(5, 3, bias=False), (4, 5), (4, 3)),
        (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=2), (3, 4, 9, 8), (3, 6, 6, 8)),
        (nn.Conv2d(3, 5, 1, bias=False), (2, 3, 4, 5), (2, 5, 4, 5)),
        (nn.BatchNorm2d(4), (3, 4, 5, 6), (3, 4, 5, 6)),
        (nn.LayerNorm(6), (3, 5, 6), (3, 5, 6)),
        (nn.LayerNorm((2, 3), bias=False), (3, 5, 2, 3), (3, 5, 2, 3)),
    ],
    ids=str,
)
def test_eager_agrees_with_the_reference(module, h, s):
    from cafin_cupy import BatchNorm2d, Conv2d, LayerNorm, Linear, reference
    from cafin_cupy.rule import Averaging

    torch.manual_seed(0)
    module = module.double()
    kind = {nn.Linear: Linear, nn.Conv2d: Conv2d, nn.BatchNorm2d: BatchNorm2d, nn.LayerNorm: LayerNorm}[type(module)]
    names = ("stride", "padding", "dilation", "groups") if kind is Conv2d else ()
    bias = None if module.bias is None else module.bias.detach()
    layer = kind(module.weight.detach(), bias, **{name: getattr(module, name) for name in names})
    passes = [(shaped(*h), shaped(*s)) for _ in range(2)]
    raw, sums = [torch.zeros(()), torch.zeros(()), 0], None
    for pair in passes:
        raw = [a + b for a, b in zip(raw, layer_sums(module, *pair))]
        new = reference.raw_sums(layer, *pair)
        sums = new if sums is None else reference.add_sums(sums, new)
    for got, want in zip(layer_moments(module, *raw), reference.raw_moments(layer, sums)):
        assert got.shape == want.shape
        assert error(got, want) < 1e-12
        old = torch.rand_like(want)
        assert error(average(old, got, 0.8), reference.average(old, want, Averaging.parity(0.8))) < 1e-12


def test_eager_samples_only_every_TCov_th_step():
    model = nn.Linear(3, 2)
    optimizer = Eager(model, TCov=3)
    changed = []
    for _ in range(7):
        before = optimizer.factors().get("")
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        changed.append(optimizer.factors()[""] is not before)
    assert changed == [True, False, False, True, False, False, True]


def test_eager_sums_half_precision_in_float32():
    torch.manual_seed(0)
    module, h, s = nn.Linear(5, 3), torch.randn(4096, 5).bfloat16(), torch.randn(4096, 3).bfloat16()
    for got, want in zip(layer_sums(module, h, s)[:2], layer_sums(module, h.double(), s.double())[:2]):
        assert got.dtype is torch.float32
        assert error(got, want) < 1e-3  # each square is rounded to 2**-9; in bfloat16 sums would be off by that


def command(*words, module="bench"):
    return subprocess.run(
        [sys.executable, "-m", module, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_smoke_run(tmp_path):
    """The whole command on the CPU, once: results, tables, plots and the section of a README."""
    pytest.importorskip("matplotlib")
    other, readme, out = tmp_path / "other.py", tmp_path / "README.md", tmp_path / "out"
    other.write_text("from torch.optim import SGD\n\n\ndef Plain(model):\n    return SGD(model.parameters())\n")
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    words = ("--out", str(out), "--other", f"{other}:Plain", "--readme", str(readme))
    done = command("--device", "cpu", "--quick", *words)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.json")
    assert f"results: {path}" in done.stdout
    record = json.loads(path.read_text())
    check_results(record)
    check_errors(record["sections"]["accuracy"]["data"]["contenders"])
    page = path.with_suffix(".md").read_text()
    assert "| cafin_cupy AdaFisher |" in page
    for heading in (
        "Copy speed",
        "Optimizer step",
        "Construction of all factors",
        "Whole iteration",
        "GPT-2",
        "Growth",
    ):
        assert f"### {heading}\n" in page
    assert "| cafin_cupy AdaFisher, bfloat16 |" in page
    text = readme.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n") and text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    for plot in ("step", "fim", "iteration", "transformer", "vit", "growth"):
        picture = path.with_name(f"{path.stem}-{plot}.png")
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"({picture.name})" in page
    assert f"(out/{path.stem}-step.png)" in text and f"(out/{path.stem}.md)" in text
    assert "| cafin_cupy AdaFisher |" in text and "GPT-2: iteration ms" in text
    path.with_suffix(".md").unlink()
    assert report.main([str(path)]) == 0
    assert path.with_suffix(".md").read_text() == page


def check_results(record):
    for key in ("device", "driver", "cuda", "torch", "cupy", "python", "commit", "date"):
        assert key in record["environment"]
    assert record["conditions"]["mode"] == "smoke"
    assert record["conditions"]["tf32"] is False
    sections = record["sections"]
    status = {name: section["status"] for name, section in sections.items()}
    assert status == {
        **dict.fromkeys(SECTIONS, "ok"),
        **dict.fromkeys(("graphs", "memory", "launches"), "not applicable"),
    }
    assert set(sections["step"]["data"]["contenders"]) == {"ours", "eager", "sgd", "adamw", "other"}
    assert set(sections["fim"]["data"]["contenders"]) == {"ours", "eager"}
    assert sections["fim"]["data"]["layers"] == 41
    tracks = {(track["contender"], track["TCov"]) for track in sections["iteration"]["data"]["tracks"]}
    sampling = {(key, TCov) for key in ("ours", "eager") for TCov in (1, 2)}
    assert tracks == sampling | {(key, None) for key in ("none", "sgd", "adamw", "other")}
    for times in sections["step"]["data"]["contenders"].values():
        figure = times["device"]
        assert 0 < figure["min"] <= figure["p20"] <= figure["median"] <= figure["p80"]
    for name in ("transformer", "vit"):
        data = sections[name]["data"]
        assert set(data["step"]["contenders"]) == {"ours", "eager", "sgd", "adamw", "other"}
        assert set(data["fim"]["contenders"]) == {"ours", "eager"}
        assert set(data["fim"]["dtypes"]) == {"float32", "bfloat16"}
        tracks = [(track["contender"], track["TCov"]) for track in data["iteration"]["tracks"]]
        assert tracks == [("none", None), ("ours", 1), ("ours", 2), ("sgd", None), ("adamw", None), ("other", None)]
    grown = sections["growth"]["data"]
    assert [row["tensors"] for row in grown["tensors"]["rows"]] == list(SMOKE.tensors)
    assert [row["batch"] for row in grown["batch"]["rows"]] == list(SMOKE.batches)
    for row in grown["parameters"]["rows"]:
        assert set(row["contenders"]) == {"ours", "sgd", "adamw"}
        assert 0 < row["error"] <= growth.TOLERANCE
    assert sections["first"]["data"]["import"]["samples"] == 5


def check_errors(found):
    assert set(found) == {"ours", "eager"}
    for errors in found.values():
        assert set(errors) == {"parameter", "momentum", "H", "S"}
        assert set(errors["parameter"]) == {"conv", "norm", "linear", "bias"}
        assert all(value < TOLERANCE for groups in errors.values() for value in groups.values())


def test_report_refuses_a_readme_without_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing here")
    with pytest.raises(ValueError, match="must hold"):
        report.replace_section(readme, "text")
    assert readme.read_text() == "nothing here"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = command()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "no CUDA device" in done.stderr


def test_a_failing_contender_fails_alone(tmp_path):
    other = tmp_path / "other.py"
    other.write_text("class Broken:\n    def __init__(self, model):\n        raise RuntimeError('broken on purpose')\n")
    words = ["--device", "cpu", "--sections", "copy,step", "--out", str(tmp_path), "--other", f"{other}:Broken"]
    done = command(*words)
    assert done.returncode == 1
    assert "broken on purpose" in done.stderr
    (path,) = tmp_path.glob("*.json")
    section = json.loads(path.read_text())["sections"]["step"]
    assert section["status"] == "failed"
    assert [failure["contender"] for failure in section["failures"]] == ["other"]
    assert set(section["data"]["contenders"]) == {"ours", "eager", "sgd", "adamw"}


def test_an_unknown_section_is_refused():
    done = command("--device", "cpu", "--sections", "stepp")
    assert done.returncode == 2 and "stepp" in done.stderr


def test_the_real_sizes_on_a_cpu():
    words = ["--device", "cpu", "--full", "--threads", "2"]
    mode, sizes = plan(arguments(words), cuda=False)
    assert (mode, sizes.image, sizes.width) == ("cpu", 32, 64) and sizes.batch in (32, 128)
    assert stem({"date": "2026-11-30T00:00:00", "device": "CPU (x86_64)"}, mode) == "2026-11-30-cpu"
    assert plan(arguments(["--device", "cpu"]), cuda=False) == ("smoke", SMOKE)


def test_no_threads_are_refused():
    done = command("--device", "cpu", "--threads", "0")
    assert done.returncode == 2 and "--threads" in done.stderr


def test_earlier_results_still_render(tmp_path):
    """Those that are stored; and what is left of them without the sections that came later."""
    pytest.importorskip("matplotlib")
    stored = list((ROOT / "bench" / "results").glob("*h200.json"))
    assert stored
    for results, later in itertools.product(stored, [(), ("graphs", "transformer", "vit", "growth", "first")]):
        record = json.loads(results.read_text())
        for name in later:
            del record["sections"][name]
        path = tmp_path / results.name
        path.write_text(json.dumps(record))
        written = report.write(path)
        assert {file.name for file in written} >= {f"{path.stem}.md", f"{path.stem}-step.png"}
        text = brief(json.loads(path.read_text()), "page", [])
        assert text.count("| cafin_cupy AdaFisher |") >= 1
