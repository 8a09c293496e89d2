"""The options of `ksopt bench models` as texts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ksopt.system.option_fields import number, option, whole_number

_WHAT, _HOW = "what is measured", "how it is measured"


@dataclass(frozen=True)
class ModelsOptions:
    """The options of the command line, one field each."""

    models: str = option(
        "vit,gpt2,llama",
        "some of vit, gpt2, llama, gpt2-124m, tinyllama, with commas (%(default)s)",
        _WHAT,
        is_always_shown=True,
    )
    dtypes: str = option(
        "float32,bfloat16",
        "some of float32, bfloat16, float16, with commas (%(default)s)",
        _WHAT,
        is_always_shown=True,
    )
    passes: str = option("forward,step", "forward, step (a training step), or both", _WHAT)
    modes: str = option(
        "default,graphs",
        "some of default, graphs (CUDA graphs: mode reduce-overhead), recorded (the whole call, a "
        "step's optimizer too, in one CUDA graph), with commas",
        _WHAT,
    )
    chain: str = option(
        "half",
        "the chain of every linear layer: half (default), quarter, paper, or a rule such as "
        '"(1,out/4,mid/4,4)*(4,mid/4,in/4,1)", mid the smaller of in and out',
        _WHAT,
        metavar="RULE",
        is_always_shown=True,
    )
    plan: str | None = option(
        None, "a plan.json, as ksopt search writes it, in the place of --chain", _WHAT,
        metavar="FILE",
    )  # fmt: skip
    ways: str = option(
        "max-autotune,uncompiled,inductor,ksopt,kslinear,kslinear-max-autotune",
        "what the dense model is compared with, with commas (%(default)s)",
        _WHAT,
    )
    small: bool = option(False, "small models, which a CPU compiles and runs too", _WHAT)
    layers: int | None = option(
        None, "blocks of each model, instead of all", _WHAT, parse=whole_number, metavar="N"
    )
    batch: int | None = option(
        None, "images, or sequences, instead of the model's own", _WHAT, parse=whole_number,
        metavar="N",
    )  # fmt: skip
    length: int | None = option(
        None, "tokens of a sequence, instead of the model's own; 1 as in decoding", _WHAT,
        parse=whole_number, metavar="N",
    )  # fmt: skip
    device: str = option(
        "auto", "cpu, cuda, cuda:1; auto (default): a GPU if there is one", _HOW,
        is_always_shown=True,
    )  # fmt: skip
    tune: str | None = option(
        None, "how ksopt decides: measure, model or off (its own default)", _HOW, metavar="WAY"
    )
    dynamic: bool = option(False, "compile for any batch and length (dynamic=True)", _HOW)
    fresh_caches: bool = option(
        False, "compile each way with empty caches of torch: first calls are then comparable", _HOW
    )
    seconds: float = option(
        2.0, "to time the ways of a case, about (%(default)s)", _HOW, parse=number
    )
