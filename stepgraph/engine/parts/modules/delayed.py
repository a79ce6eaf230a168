"""Records the backward of a module whose layers leave their weight gradients for later.

Such a layer has `delay_wgrad_compute=True`: its backward computes the gradient of the input, and `backward_dw()` that
of the weight. The graphs do the same in two parts (`pair.ordered`). No other backward can be added to a runner later:
the tensors that its weight gradients start from would lie where backwards that were captured before write.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stepgraph.core.errors import CaptureError
from stepgraph.engine.memory.borrowed import BorrowedTensor
from stepgraph.engine.observe.step_objects import leaves_behind
from stepgraph.engine.parts.modules.site import ModuleSite
from stepgraph.engine.record.pair.call import EagerCall
from stepgraph.engine.record.pair.ordered import InputPart, record_input_part, record_weight_part
from stepgraph.engine.record.pair.runner import Runner


def leaves_weights(site: ModuleSite, runner: Runner, call: EagerCall) -> bool:
    """True if the backward of a call leaves weight gradients: a method may use none of its module's weights."""
    if not site.manager.leaves_weights:
        return False
    results = [runner.result.tensors[i] for i, meta in enumerate(call.metas) if meta is not None]
    weights = set(map(id, site.manager.target.pair().proxies.leaves))
    return bool(runner.edges.outside) or any(id(leaf) in weights for leaf in leaves_behind(results))


def record_inputs(
    site: ModuleSite,
    runner: Runner,
    call: EagerCall,
    given: Mapping[int, torch.Tensor],
    lent: Mapping[int, BorrowedTensor] | None = None,
) -> InputPart:
    """Record the gradients of a call's inputs. `given` are buffers for the gradients of results; others are made."""
    target, pair = site.manager.target, site.manager.target.pair()
    present = {i: meta for i, meta in enumerate(call.metas) if meta is not None}
    device = pair.session.backend.device
    incoming = {i: given[i] if i in given else meta.empty(device) for i, meta in present.items()}
    autocast = call.backward_autocast
    part = record_input_part(pair, runner, call.metas, incoming, target.name, autocast, lent=lent)
    runner.backwards.record = None
    return part


def record_weights(site: ModuleSite, runner: Runner, call: EagerCall, part: InputPart, *, may_repeat: bool) -> None:
    """Record the weight gradients that a backward has left.

    `may_repeat`: keep their memory, so that they can be replayed in any order, and recorded again.
    """
    pair = site.manager.target.pair()
    options = {"knows_origin": True, "keeps_saved": True, "may_repeat": may_repeat}
    record_weight_part(pair, runner, part, call.backward_autocast, **options)


def never_asked(name: str) -> CaptureError:
    """Make the error for a module whose weight gradients nobody computes."""
    return CaptureError(
        f"{name}: a layer inside has delay_wgrad_compute=True, and the warm-up did not call backward_dw()",
        rule="delayed-weights",
    )
