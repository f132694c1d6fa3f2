"""Training steps of GPT-2 XL, BERT-large and a Llama of 1B parameters in bf16 on one GPU, and kernels by themselves.

Run ``make gpu``, or ``python -m benchmarks.gpu.kernels``; with ``--cpu`` it takes tiny models on the CPU, to see that all of it
runs. Sides: the unmodified model of Transformers, eager; the same by ``torch.compile``; with Liger-Kernel alone, as
Transformers applies it, where it knows the model; and ours, ``use_kernels()`` with every layer compiled. Each side of each
batch has a process of its own, so that one that runs out of memory ends alone. The table has tokens per second and peak memory
at one batch for all, and at each side's own best. A second table has the share of the memory bandwidth or of the
matmuls that each kernel reaches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

SIDES = ("eager", "torch.compile", "Liger", "ours")
STEPS, WARM_UP, IN_A_ROW = 10, 3, 5
BATCHES = (4, 8, 16, 32, 64, 128)
"""Rows; the first is the one that all sides are compared at."""
NO_MEMORY, UNKNOWN = "out of memory", "Liger-Kernel has none"


class Model(NamedTuple):
    """A class of Transformers.

    Args:
        head: ``Auto`` class.
        config: Class of its configuration, and the arguments.
        layers: Path of the list of its layers.
        sequence: Tokens in a row.
    """

    head: str
    config: str
    sizes: dict[str, Any]
    layers: str
    sequence: int


_LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
MODELS = {
    "GPT-2 XL": Model(
        "AutoModelForCausalLM", "GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, "transformer.h", 1024
    ),
    "BERT-large": Model(
        "AutoModelForMaskedLM",
        "BertConfig",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        "bert.encoder.layer",
        512,
    ),
    "Llama 1B": Model(
        "AutoModelForCausalLM",
        "LlamaConfig",
        {**_LLAMA, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 2048},
        "model.layers",
        2048,
    ),
}
TINY = {
    "GPT-2 XL": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64},
    "BERT-large": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "Llama 1B": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
    },
}


class Found(NamedTuple):
    """Tokens per second, GiB at the peak, and the loss of the first step."""

    tokens: float
    memory: float
    loss: float


def made(name: str, device: str) -> tuple[nn.Module, int]:
    """The model with bf16 weights in training mode, and the tokens in a row."""
    import transformers

    model, is_tiny = MODELS[name], device == "cpu"
    sizes = {**model.sizes, **(TINY[name] if is_tiny else {})}
    if is_tiny and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = 1
    config = getattr(transformers, model.config)(**sizes)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        found = getattr(transformers, model.head).from_config(config, dtype=torch.bfloat16)
    return found.train(), 16 if is_tiny else model.sequence


def prepared(name: str, side: str, model: Any) -> Any:
    """The model as this side runs it.

    Raises:
        LookupError: Liger-Kernel has nothing for it.
    """
    if side == "torch.compile":
        return torch.compile(model)
    if side == "Liger":
        from liger_kernel.transformers import monkey_patch

        if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise LookupError(UNKNOWN)
        monkey_patch._apply_liger_kernel_to_instance(model=model)  # as Transformers' own Trainer does
    if side == "ours":
        from slapo_core import create_schedule

        schedule = create_schedule(model)
        schedule.use_kernels()
        if MODELS[name].head == "AutoModelForCausalLM":
            schedule.use_kernels("linear_cross_entropy")
        schedule[MODELS[name].layers].compile()
    return model


def measure(name: str, side: str, batch: int, device: str) -> Found:
    """Steps with a fused AdamW."""
    plain, sequence = made(name, device)
    model = prepared(name, side, plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, plain.config.vocab_size, (batch, sequence), device=device)
    times, first = [], 0.0
    for step in range(WARM_UP + STEPS):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()  # waits for the device
        first = value if step == 0 else first
        times.append(time.perf_counter() - start)
    seconds = sorted(times[WARM_UP:])[STEPS // 2]
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return Found(batch * sequence / seconds, memory, first)


def in_a_process(name: str, side: str, batch: int, device: str) -> Found | str:
    """Result of one side, or the reason for its failure."""
    command = [sys.executable, "-m", "benchmarks.gpu.kernels", "--one", name, side, str(batch), device]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode == 0:
        return Found(*json.loads(run.stdout.splitlines()[-1]))
    said = run.stderr.strip().splitlines()[-1] if run.stderr.strip() else "nothing said"
    if "OutOfMemoryError" in run.stderr:
        return NO_MEMORY
    return UNKNOWN if UNKNOWN in said else said[:120]


def steps(device: str) -> None:
    """Print the first table.

    Raises:
        AssertionError: a side starts from another loss than the unmodified model, as far as bf16 and its dropout go.
    """
    print("\n| model | side | tokens/s | / eager | GiB | best batch | tokens/s | / eager |\n|---|---|---|---|---|---|---|---|")
    for name in MODELS:
        base: Found | None = None
        best_base = 0.0
        for side in SIDES:
            tried: dict[int, Found | str] = {}
            for batch in BATCHES if device == "cuda" else BATCHES[:1]:
                tried[batch] = in_a_process(name, side, batch, device)
                if isinstance(tried[batch], str):
                    break
            ran = {batch: found for batch, found in tried.items() if isinstance(found, Found)}
            if not ran:
                print(f"| {name} | {side} | {tried[BATCHES[0]]} | | | | | |", flush=True)
                continue
            best = max(ran, key=lambda batch: ran[batch].tokens)
            one = ran[BATCHES[0]]
            base, best_base = base or one, best_base or ran[best].tokens
            assert abs(one.loss - base.loss) < 0.02 * abs(base.loss), f"{name}: {side} starts from another loss"
            print(
                f"| {name} | {side} | {one.tokens:.0f} | {one.tokens / base.tokens:.2f} | {one.memory:.1f} | {best} | "
                f"{ran[best].tokens:.0f} | {ran[best].tokens / best_base:.2f} |",
                flush=True,
            )


def kernels(device: str) -> None:
    """Print the second table: forward and backward, bytes that have to be read and written against a copy of them."""
    import slapo_kernels

    rows, width = (64, 32) if device == "cpu" else (16384, 4096)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    x, y, w, b = leaves = numbers(rows, width), numbers(rows, width), numbers(width), numbers(width)
    calls: dict[str, tuple[int, Callable[..., Any]]] = {  # tensors of this size that forward and backward read or write
        "rms_norm": (5, lambda run: run(x, w, eps=1e-6)),
        "layer_norm": (5, lambda run: run(x, w, b, eps=1e-6)),
        "swiglu": (8, lambda run: run(x, y)),
        "geglu": (8, lambda run: run(x, y, approximate="tanh")),
        "bias_act": (5, lambda run: run(x, b, activation="gelu_tanh")),
        "bias_dropout_residual": (6, lambda run: run(x, b, y, p=0.1, training=True)),
    }
    copied = _seconds(lambda: x.detach().clone(), device) / 2  # one tensor read or written
    print("\n| kernel | implementation | ms | share of the bandwidth of a copy |\n|---|---|---|---|")
    for kernel, (tensors, call) in calls.items():
        for found in slapo_kernels.explain(kernel, device, torch.bfloat16):
            if found.lacks is not None:
                continue
            choice = found.implementation.name

            def step(kernel: str = kernel, call: Callable[..., Any] = call, choice: str = choice) -> None:
                for leaf in leaves:
                    leaf.grad = None  # adding to it would be another pass over memory
                call(lambda *args, **options: slapo_kernels.run(kernel, *args, choice=choice, **options)).backward(y.detach())

            seconds = _seconds(step, device)
            print(f"| {kernel} | {choice} | {seconds * 1e3:.3f} | {tensors * copied / seconds:.2f} |", flush=True)
    q = numbers(4, 16, rows // 16, 64)
    floor = _seconds(lambda: torch.matmul(x.detach(), x.detach().T), device) / (2 * rows * rows * width)
    for found in slapo_kernels.explain("attention", device, torch.bfloat16):
        if found.lacks is None:
            choice = found.implementation.name
            attend = lambda choice=choice: slapo_kernels.run("attention", q, q, q, is_causal=True, choice=choice)  # noqa: E731
            seconds = _seconds(lambda attend=attend: attend().backward(q.detach()), device)
            work = 3.5 * 2 * 2 * 4 * 16 * (rows // 16) ** 2 * 64 / 2  # forward and backward of the lower half
            print(f"| attention, of a matmul's | {choice} | {seconds * 1e3:.3f} | {work * floor / seconds:.2f} |", flush=True)
    logits = numbers(rows // 8, width)
    head, labels = numbers(width * 8, width), torch.randint(0, width * 8, (rows // 8,), device=device)
    plain = _seconds(lambda: F.cross_entropy(F.linear(logits, head).float(), labels).backward(), device)
    for found in slapo_kernels.explain("linear_cross_entropy", device, torch.bfloat16):
        if found.lacks is None:
            choice = found.implementation.name
            seconds = _seconds(
                lambda choice=choice: slapo_kernels.run("linear_cross_entropy", logits, head, labels, choice=choice).backward(),
                device,
            )
            print(
                f"| linear_cross_entropy, of plain torch's | {choice} | {seconds * 1e3:.3f} | {plain / seconds:.2f} |",
                flush=True,
            )


def _seconds(step: Callable[[], Any], device: str) -> float:
    """Return the seconds of one step, the median of some rounds of several steps, so that the device never waits for a call."""
    times = []
    for turn in range(WARM_UP + STEPS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        if turn >= WARM_UP:
            times.append((time.perf_counter() - start) / IN_A_ROW)
    return sorted(times)[STEPS // 2]


def main() -> None:
    """Print both tables; or with ``--one`` what one side of one model gives, for the process that asked."""
    if "--one" in sys.argv:
        name, side, batch, device = sys.argv[2:6]
        print(json.dumps(measure(name, side, int(batch), device)))
        return
    device = "cpu" if "--cpu" in sys.argv else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; with --cpu tiny models show that all of this runs")
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu, tiny models: no figure means anything"
    print(f"{where}, torch {torch.__version__}, bf16, forward, backward and AdamW")
    steps(device)
    kernels(device)


if __name__ == "__main__":
    main()
