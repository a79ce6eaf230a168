"""Functions of torch and of libraries that read tensors on the host where the user has written no such thing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepgraph.errors import Location


@dataclass(frozen=True, slots=True)
class _Reader:
    file: str
    """How its path within torch begins."""
    function: str
    """Its name, or nothing for all of the file."""
    fix: str


_READERS = (
    _Reader(
        "distributions/",
        "",
        "torch.distributions.Distribution.set_default_validate_args(False) before the step, or validate_args=False: to "
        "validate arguments is to read them.",
    ),
    _Reader(
        "nn/modules/batchnorm.py",
        "",
        "give BatchNorm a momentum (momentum=0.1): with momentum=None it reads num_batches_tracked at each call.",
    ),
    _Reader(
        "nn/modules/transformer.py",
        "_detect_is_causal_mask",
        "say whether the mask is causal, so that nobody looks: is_causal=True or False (of nn.Transformer "
        "src_is_causal and tgt_is_causal, of a decoder tgt_is_causal).",
    ),
    _Reader(
        "nn/modules/transformer.py",
        "forward",
        "nn.TransformerEncoder(..., enable_nested_tensor=False): in eval mode it makes nested tensors of a padded "
        "batch, and reads the padding mask for it.",
    ),
    _Reader(
        "optim/swa_utils.py",
        "",
        "call update_parameters outside, after the step: it reads n_averaged at each call.",
    ),
    _Reader(
        "nn/utils/clip_grad.py",
        "",
        "leave error_if_nonfinite off and look at the returned norm after the step.",
    ),
    *(
        _Reader(
            file,
            "",
            "leave the batch padded and mask the results: a packed sequence has its lengths on the host, and is packed "
            "by them.",
        )
        for file in ("nn/utils/rnn.py", "nn/modules/rnn.py")
    ),
)


def fix_for(reader: Location) -> str | None:
    """What to do about a host read in a function of torch, where that is known."""
    rows = (row for row in _READERS if reader.file.startswith(row.file))
    return next((row.fix for row in rows if row.function in ("", reader.function)), None)


_LIBRARIES = re.compile(r"-packages[/\\](\w+)")
_MASKS = (
    "give the model an attention mask of four dimensions, boolean and built outside the step, and use_cache=False: it "
    "reads a mask of two, or makes one, to see what it hides."
)


def fix_in_library(where: Location) -> str | None:
    """What to do about a host read in a library's code."""
    found = _LIBRARIES.search(where.file)
    if found is None:
        return None
    if found[1] == "transformers" and "mask" in where.file:
        return _MASKS
    return (
        f"this is inside {found[1]}: give it arguments with which it does not read, do this part outside the step, or "
        "graph the parts around it (stepgraph.graph_modules)."
    )
