"""Choice of an implementation by arguments, environment and plugins, and the errors if it cannot be used."""

from __future__ import annotations

import doctest
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import slapo_kernels.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo.cli.app import create_app
from slapo_core import PluginError, ScheduleError, create_schedule, hookimpl
from slapo_kernels import Implementation, choose, explain, hookspecs, kernel_names, reset, run
from slapo_kernels.dispatch.kernels import KERNELS
from slapo_testing import isolated_plugins

X, W = torch.randn(4, 8), torch.ones(8)


@pytest.fixture(autouse=True)
def nothing_chosen() -> Iterator[None]:
    reset()
    yield
    reset()


def test_every_kernel_has_an_eager_implementation_and_it_is_the_last() -> None:
    assert {kernel.implementations[-1].name for kernel in KERNELS.values()} == {"eager"}


def test_the_kernels_there_are() -> None:
    norms, gates = {"rms_norm", "layer_norm"}, {"swiglu", "geglu"}
    others = {"attention", "rotary", "bias_act", "bias_dropout_residual", "linear_cross_entropy", "embedding"}
    assert set(kernel_names()) == norms | gates | others


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("attention", "native"),
        ("rms_norm", "inductor"),
        ("layer_norm", "native"),
        ("swiglu", "inductor"),
        ("bias_dropout_residual", "eager"),
        ("linear_cross_entropy", "native"),
        ("embedding", "native"),
    ],
)
def test_the_first_choice_on_a_cpu(kernel: str, name: str) -> None:
    assert choose(kernel, "cpu", torch.float32).name == name


def test_a_device_that_nothing_knows_gets_what_works_everywhere() -> None:
    assert choose("attention", "meta", torch.float32).name == "native"
    assert choose("swiglu", "meta", torch.float32).name == "eager"


@pytest.mark.parametrize(
    ("kernel", "name", "package"),
    [
        ("attention", "flash", "flash-attn"),
        ("rms_norm", "liger", "liger-kernel"),
        ("linear_cross_entropy", "liger", "liger-kernel"),
    ],
)
def test_a_package_that_is_missing_is_one_to_install(kernel: str, name: str, package: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        choose(kernel, "cuda", torch.bfloat16, name)
    sentence = f"implementation {name!r} of kernel {kernel!r} needs {package}, which is not installed; pip install {package}"
    assert str(caught.value) == sentence


def test_an_implementation_for_another_device_or_dtype() -> None:
    with pytest.raises(ScheduleError, match=r"'liger' of kernel 'rms_norm' works on cuda, not on cpu$"):
        choose("rms_norm", "cpu", torch.float32, "liger")
    with pytest.raises(ScheduleError, match=r"'flash' of kernel 'attention' takes bfloat16 and float16, not float32$"):
        choose("attention", "cuda", torch.float32, "flash")
    with pytest.raises(ScheduleError, match="'liger' of kernel 'rms_norm' works on cuda, not on cpu"):
        run("rms_norm", X, W, eps=1e-6, choice="liger")


def test_a_compiler_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ScheduleError, match=r"needs a C\+\+ compiler, and there is none; install g\+\+"):
        choose("swiglu", "cpu", torch.float32, "inductor")
    assert choose("swiglu", "cpu", torch.float32).name == "eager"


def test_unknown_names_are_told_the_nearest() -> None:
    with pytest.raises(ScheduleError, match="no kernel 'rmsnorm'; did you mean 'rms_norm'"):
        choose("rmsnorm", "cpu", torch.float32)
    with pytest.raises(ScheduleError, match="no implementation 'inducter' of kernel 'swiglu'; did you mean 'inductor'"):
        choose("swiglu", "cpu", torch.float32, "inducter")
    with pytest.raises(ScheduleError, match="no kernel 'rmsnorm'"):
        run("rmsnorm", X, W, eps=1e-6)


def test_importing_it_imports_no_package_of_kernels() -> None:
    code = "import sys, slapo_kernels, slapo_kernels.op; slapo_kernels.explain('attention', 'cuda'); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert {"triton", "flash_attn", "liger_kernel", "transformers", "typer"}.isdisjoint(result.stdout.split())


class Environment:
    """``SLAPO_KERNELS``."""

    @pytest.fixture
    def force(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
        return lambda text: monkeypatch.setenv("SLAPO_KERNELS", text)


class TestEnvironment(Environment):
    def test_it_forces(self, force: Callable[[str], None]) -> None:
        force("rms_norm=native, bias_act=eager")
        assert choose("rms_norm", "cpu", torch.float32).name == "native"
        assert choose("bias_act", "cpu", torch.float32).name == "eager"
        assert choose("swiglu", "cpu", torch.float32).name == "inductor"

    def test_a_choice_in_the_code_goes_before_it(self, force: Callable[[str], None]) -> None:
        force("rms_norm=native")
        assert choose("rms_norm", "cpu", torch.float32, "eager").name == "eager"

    def test_a_star_is_every_kernel_that_has_it_and_a_name_goes_before_it(self, force: Callable[[str], None]) -> None:
        force("rms_norm=inductor,*=native")
        chosen = {
            kernel: choose(kernel, "cpu", torch.float32).name for kernel in ("rms_norm", "attention", "bias_dropout_residual")
        }
        assert chosen == {"rms_norm": "inductor", "attention": "native", "bias_dropout_residual": "eager"}

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("rms_norm", "SLAPO_KERNELS has 'rms_norm'; write kernel=implementation, with commas between"),
            ("rms=eager", "SLAPO_KERNELS has 'rms=eager': no kernel 'rms'"),
            ("rms_norm=egear", "SLAPO_KERNELS has 'rms_norm=egear': no implementation 'egear' of kernel 'rms_norm'"),
            ("*=egear", "SLAPO_KERNELS has '[*]=egear', an implementation that no kernel has"),
            ("rms_norm=eager,*=native,rms_norm=native", "SLAPO_KERNELS has both 'eager' and 'native' for 'rms_norm'"),
            ("rms_norm=liger", "'liger' of kernel 'rms_norm', which SLAPO_KERNELS forces, works on cuda, not on cpu"),
        ],
    )
    def test_what_it_cannot_force(self, force: Callable[[str], None], text: str, sentence: str) -> None:
        force(text)
        with pytest.raises(ScheduleError, match=sentence):
            choose("rms_norm", "cpu", torch.float32)


class TestWhoComputes:
    @pytest.fixture
    def lines(self) -> Iterator[list[str]]:
        found: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("Slapo")
        logger.addHandler(handler)
        yield found
        logger.removeHandler(handler)

    def test_the_choice_is_said_once(self, lines: list[str]) -> None:
        for _ in range(2):
            run("layer_norm", X, W, None, eps=1e-6)
            run("layer_norm", X.double(), W.double(), None, eps=1e-6)
        run("layer_norm", X, W, None, eps=1e-6, choice="eager")
        assert lines == ["kernel layer_norm on cpu: native"]

    def test_little_is_left_to_eager_and_much_is_compiled(self) -> None:
        (implementation,) = [each for each in KERNELS["bias_act"].implementations if each.name == "inductor"]
        assert implementation.avoids is not None
        assert implementation.avoids(X, W, activation="gelu")
        assert not implementation.avoids(torch.empty(1 << 16), W, activation="gelu")
        assert implementation.avoids(torch.empty(1 << 16), W, activation="relu")

    def test_what_refuses_a_call_leaves_it_to_the_next(self) -> None:
        picky = Implementation(_twice, refuses=lambda x, weight, *, eps: "is fed up" if eps > 1 else None, preferred=True)
        with isolated_plugins(
            slapo_tracing.plugin, slapo_training.plugin, slapo_kernels.plugin, plugin(rms_norm={"picky": picky})
        ):
            assert torch.equal(run("rms_norm", X, W, eps=0.1), 2 * X)
            torch.testing.assert_close(run("rms_norm", X, W, eps=2.0), run("rms_norm", X, W, eps=2.0, choice="eager"))
            with pytest.raises(ScheduleError, match="implementation 'picky' of kernel 'rms_norm' is fed up"):
                run("rms_norm", X, W, eps=2.0, choice="picky")

    def test_a_traced_model_shows_plain_operations(self) -> None:
        class Norm(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return run("rms_norm", x, W.to(x), eps=1e-6, choice="mine")

        with isolated_plugins(
            slapo_tracing.plugin, slapo_training.plugin, slapo_kernels.plugin, plugin(rms_norm={"mine": _twice})
        ):
            sch = create_schedule(Norm(), example_inputs=(X,))
            sch.trace()
            assert torch.rsqrt in [node.target for node in sch.mod.graph.nodes]
            assert torch.equal(Norm()(X), 2 * X)

    def test_who_only_counts_changes_nothing_and_who_records_sees_plain_operations(self) -> None:
        with isolated_plugins(
            slapo_tracing.plugin,
            slapo_training.plugin,
            slapo_kernels.plugin,
            plugin(rms_norm={"mine": Implementation(_twice, preferred=True)}),
        ):
            plain = run("rms_norm", X, W, eps=1e-6, choice="eager")
            with FlopCounterMode(display=False), torch.device("cpu"):
                assert torch.equal(run("rms_norm", X, W, eps=1e-6), 2 * X)
            with Recording():
                torch.testing.assert_close(run("rms_norm", X, W, eps=1e-6), plain)
            with FakeTensorMode(allow_non_fake_inputs=True):
                assert run("rms_norm", X, W, eps=1e-6).shape == X.shape

    @pytest.mark.parametrize("kernel", ["rms_norm", "layer_norm"])
    def test_a_compiler_sees_operations_of_torch(self, kernel: str) -> None:
        weights = (W,) if kernel == "rms_norm" else (W, None)

        @torch.compile(fullgraph=True, backend="eager")
        def norm(x: torch.Tensor) -> Any:
            return run(kernel, x, *weights, eps=1e-6)

        torch.testing.assert_close(norm(X), run(kernel, X, *weights, eps=1e-6, choice="eager"))


class Recording(TorchFunctionMode):
    """As the one that traces models."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def plugin(**kernels: Any) -> SimpleNamespace:
    """One that provides implementations."""

    @hookimpl
    def slapo_kernels() -> Any:
        return kernels

    return SimpleNamespace(slapo_kernels=slapo_kernels)


def _twice(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return 2 * x


class TestOtherPlugins:
    def test_theirs_comes_last_unless_it_is_preferred(self) -> None:
        theirs = {"last": _twice, "first": Implementation(_twice, devices=("cpu",), preferred=True)}
        with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, slapo_kernels.plugin, plugin(rms_norm=theirs)):
            names = [each.implementation.name for each in explain("rms_norm", "cpu")]
            assert names == ["first", "inductor", "liger", "native", "eager", "last"]
            assert torch.equal(run("rms_norm", X, W, eps=1e-6), 2 * X)
            assert choose("rms_norm", "cuda", torch.float32).name == "native"
            assert choose("rms_norm", "cuda", torch.float32, "last").kernel == "rms_norm"

    def test_two_of_one_name(self) -> None:
        with isolated_plugins(
            slapo_tracing.plugin,
            slapo_training.plugin,
            slapo_kernels.plugin,
            plugin(swiglu={"mine": _twice}),
            plugin(swiglu={"mine": _twice}),
        ):
            with pytest.raises(PluginError, match="implementation 'swiglu=mine' is provided by .* and "):
                choose("swiglu", "cpu", torch.float32, "mine")
            assert choose("swiglu", "cpu", torch.float32).name == "inductor"

    def test_one_that_cannot_be_imported_takes_nothing_with_it(self) -> None:
        broken = Implementation("slapo_kernels.no_such_file:rms_norm", preferred=True)
        with isolated_plugins(
            slapo_tracing.plugin, slapo_training.plugin, slapo_kernels.plugin, plugin(rms_norm={"broken": broken})
        ):
            assert choose("rms_norm", "cpu", torch.float32).name == "inductor"
            first, *_ = explain("rms_norm", "cpu")
            assert "No module named 'slapo_kernels.no_such_file'" in str(first.lacks)
            with pytest.raises(PluginError, match="'rms_norm=broken' of .* cannot be used: No module named"):
                run("rms_norm", X, W, eps=1e-6, choice="broken")

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            ({"rmsnorm": {"mine": _twice}}, "names an unknown kernel: no kernel 'rmsnorm'; did you mean 'rms_norm'"),
            ({"rms_norm": _twice}, "return {kernel: {name: implementation}}"),
            ({"rms_norm": {"mine": "not a path"}}, "'not a path' is not of the form 'module:Class'"),
            ({"rms_norm": {"mine": 3}}, "3 is not a function"),
            ({"rms_norm": {"a,b": _twice}}, "calls an implementation 'a,b', which is not a name"),
        ],
        ids=["kernel", "nesting", "path", "number", "name"],
    )
    def test_what_they_give_is_checked(self, given: Any, sentence: str) -> None:
        with (
            isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, slapo_kernels.plugin, plugin(**given)),
            pytest.raises(PluginError) as caught,
        ):
            choose("rms_norm", "cpu", torch.float32)
        assert sentence in str(caught.value)

    def test_the_example_of_the_hook_is_one(self) -> None:
        space = {"hookimpl": hookimpl, "Implementation": Implementation}
        example = "".join(line.source for line in doctest.DocTestParser().get_examples(hookspecs.slapo_kernels.__doc__ or ""))
        exec(example, space)  # noqa: S102  ours
        with isolated_plugins(
            slapo_tracing.plugin,
            slapo_training.plugin,
            slapo_kernels.plugin,
            SimpleNamespace(slapo_kernels=space["slapo_kernels"]),
        ):
            with pytest.raises(ScheduleError, match="'mine' of kernel 'rms_norm' needs my-package, which is not installed"):
                choose("rms_norm", "cuda", torch.float32, "mine")
            assert choose("rms_norm", "cpu", torch.float32).name == "inductor"

    def test_a_hook_that_fails(self) -> None:
        @hookimpl
        def slapo_kernels() -> Any:
            raise RuntimeError("no kernels today")

        broken = SimpleNamespace(slapo_kernels=slapo_kernels)
        with isolated_plugins(globals()["slapo_kernels"].plugin, broken), pytest.raises(PluginError, match="no kernels today"):
            choose("rms_norm", "cpu", torch.float32)


class TestCommand:
    def test_it_says_what_is_used_here_and_why_something_is_not(self) -> None:
        lines = CliRunner().invoke(create_app(), ["kernels"]).output.splitlines()
        assert lines[0].split() == ["kernel", "implementation", "distribution", "on", "cpu"]
        assert any(line.split()[-1] == "used" and "native" in line for line in lines)
        assert sum("works on cuda, not on cpu" in line for line in lines) >= 3
        assert sum(line.split()[-1] == "used" for line in lines) == len(KERNELS)

    def test_the_same_as_data(self) -> None:
        rows = json.loads(CliRunner().invoke(create_app(), ["kernels", "--json"]).output)["kernels"]
        assert {row["kernel"] for row in rows} == set(KERNELS)
        (flash,) = [row for row in rows if row["implementation"] == "flash"]
        assert flash == {
            "kernel": "attention",
            "implementation": "flash",
            "distribution": "slapo-kernels",
            "device": "cpu",
            "used": False,
            "lacks": "works on cuda, not on cpu",
        }
