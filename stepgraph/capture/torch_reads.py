"""Functions of torch that read tensors on the host where the user has written no such thing, and what to do instead."""

from __future__ import annotations

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
