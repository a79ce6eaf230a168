"""Data: samples by number, positions that come back, prompts that are masked, packed rows of one shape."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.core.errors import InvalidArgument, StepgraphWarning
from stepgraph.lab.models import GPT, GPTConfig
from stepgraph.lab.train import finetune
from stepgraph.lab.train.data import Batches, SyntheticTokens, TokenWindows, made_text, mapped_tokens, text_tokens
from stepgraph.lab.train.instruction_data import IGNORED, Instructions, example_of, pack, read_examples
from stepgraph.lab.train.optimizer import Schedule, clip_gradients, make_adamw
from stepgraph.lab.train.policy import capture_fits, capture_is_due, is_time, predicted_graph_bytes
from stepgraph.lab.train.setup import make_source
from tests.train_harness import gpt, tiny

CPU = torch.device("cpu")


def source() -> SyntheticTokens:
    return SyntheticTokens(100, 8, seed=3)


def test_ranks_and_microbatches_share_samples_out() -> None:
    seen = []
    for rank in range(2):
        batches = Batches(source(), micro_batch_size=2, num_microbatches=3, data_rank=rank, data_size=2)
        for _ in range(2):
            seen += [row.tolist() for batch in batches.next_iteration(CPU) for row in batch["tokens"]]
    expected = [source().sample(number)["tokens"].tolist() for number in range(24)]
    assert sorted(seen) == sorted(expected)


def test_position_comes_back() -> None:
    batches = Batches(source(), 2, 1)
    batches.next_iteration(CPU)
    state = json.loads(json.dumps(batches.state_dict()))
    (after,) = batches.next_iteration(CPU)
    again = Batches(source(), 2, 1)
    again.load_state_dict(state)
    assert torch.equal(again.next_iteration(CPU)[0]["tokens"], after["tokens"])
    with pytest.raises(InvalidArgument, match="other data"):
        Batches(SyntheticTokens(100, 8, seed=4), 2, 1).load_state_dict(state)


def test_made_text_is_the_same_each_time_and_shuffled() -> None:
    assert made_text(1, 500) == made_text(1, 500) != made_text(2, 500)
    windows = TokenWindows(text_tokens(made_text(1, 500), 256), 16, 0, "text")
    firsts = [tuple(windows.sample(number)["tokens"].tolist()) for number in range(2 * 31)]
    assert len(set(firsts[:31])) == len(set(firsts)) == 31, "each epoch has all windows"
    assert firsts[:31] != firsts[31:], "in another order"
    assert torch.equal(windows.sample(5)["tokens"][1:], windows.sample(5)["targets"][:-1])


@pytest.mark.parametrize(("dtype", "code"), [("int32", "i"), ("uint16", "H")])
def test_token_files_are_mapped(tmp_path: Path, dtype: str, code: str) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(array(code, [1, 2, 60000, 4]).tobytes())
    assert mapped_tokens(path, dtype, 60001).tolist() == [1, 2, 60000, 4]
    with pytest.raises(InvalidArgument, match="the vocabulary has 100"):
        mapped_tokens(path, dtype, 100)
    path.write_bytes(b"123")
    with pytest.raises(InvalidArgument, match="not a file of tokens"):
        mapped_tokens(path, dtype, 100)


def test_prompt_tokens_have_no_target() -> None:
    example = example_of([1, 2, 3], [7, 8], seq_length=10)
    assert example.tokens == (1, 2, 3, 7, 8)
    assert example.targets == (IGNORED, IGNORED, 7, 8, 0)
    cut = example_of([1, 2, 3, 4, 5, 6], [7, 8, 9], seq_length=5)
    assert cut.tokens == (5, 6, 7, 8, 9)
    assert cut.targets == (IGNORED, 7, 8, 9, 0)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": "b"},
        {"input": "a", "output": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt_tokens": [97], "completion_tokens": [98]},
    ],
)
def test_rows_of_jsonl_are_read(tmp_path: Path, row: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n\n")
    (example,) = read_examples(tmp_path / "rows.jsonl", 256, 64)
    assert example.targets[-2:] == (98, 0)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not an example"),
        ("[]", "not a JSON object"),
        ("3", "not a JSON object"),
        ("{}", "no prompt and answer"),
        ('{"prompt": 3, "completion": "a"}', '"prompt" is 3, not a text'),
        ('{"messages": []}', "not a list of messages"),
        ('{"messages": [{"role": "assistant"}]}', '"content" is null'),
        ('{"prompt_tokens": [9]}', '"completion_tokens" is null'),
        ('{"prompt": "a", "completion": ""}', "the answer is empty"),
        ('{"prompt_tokens": [9], "completion_tokens": []}', "the answer is empty"),
        ('{"prompt_tokens": 5, "completion_tokens": [1]}', "not a list of token numbers"),
        ('{"prompt_tokens": [999], "completion_tokens": [1]}', "token 999 is outside"),
    ],
)
def test_bad_rows_are_refused_by_line(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' + line)
    with pytest.raises(InvalidArgument, match="line 2") as caught:
        read_examples(tmp_path / "rows.jsonl", 256, 64)
    assert what in str(caught.value)
    assert "object has no" not in str(caught.value)


def test_examples_that_are_cut_are_named_by_line(tmp_path: Path) -> None:
    rows = ["a" * 7, "a" * 8, "b", "c" * 100]
    text = "\n".join(json.dumps({"prompt": row, "completion": "d"}) for row in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.warns(StepgraphWarning, match="2 of 4 examples are longer than 8 tokens") as caught:
        found = read_examples(tmp_path / "rows.jsonl", 256, 8)
    assert "lines 2, 4" in str(caught[0].message)
    assert [len(example.tokens) for example in found] == [8, 8, 2, 8]


def test_missing_file_of_examples_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"dataset\.data_path=FILE"):
        read_examples(tmp_path / "none.jsonl", 256, 64)


def test_each_kind_of_data_has_its_source(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(array("H", range(100)).tobytes())
    kinds: dict[str, Any] = {"text": None, "synthetic": None, "tokens": str(tmp_path / "x.bin"), "sft": None}
    found = {
        kind: make_source(tiny(tmp_path, dataset__kind=kind, dataset__data_path=path)).fingerprint.split()[0]
        for kind, path in kinds.items()
    }
    assert found == {"text": "text", "synthetic": "synthetic", "tokens": "x.bin", "sft": "made"}


@pytest.mark.parametrize("kind", ["text", "synthetic"])
def test_file_that_would_not_be_read_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InvalidArgument, match="reads no file") as caught:
        make_source(tiny(tmp_path, dataset__kind=kind, dataset__data_path="rows.jsonl"))
    assert "--task sft" in str(caught.value)


def test_packed_rows_have_one_shape() -> None:
    examples = [example_of([1] * n, [2], 12) for n in (3, 4, 5, 2, 8)]
    rows = pack(examples, 12, max_packed=3)
    assert all(sum(len(example.tokens) for example in row) <= 12 for row in rows)
    samples = Instructions(examples, 12, 0, packed=True, name="x", max_packed=3)
    shapes = {tuple((name, tuple(t.shape)) for name, t in samples.sample(n).items()) for n in range(4)}
    assert len(shapes) == 1
    bounds = samples.sample(0)["cu_seqlens"]
    assert bounds.tolist() == sorted(bounds.tolist())
    assert (bounds[0], bounds[-1]) == (0, 12)


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_packed_examples_do_not_see_each_other(positions: str) -> None:
    from dataclasses import replace

    model = GPT(replace(GPTConfig.tiny(), positions=positions)).eval()
    tokens = torch.randint(256, (1, 10))
    together = model(tokens, cu_seqlens=torch.tensor([[0, 4, 10, 10]]))
    apart = torch.cat([model(tokens[:, :4]), model(tokens[:, 4:])], 1)
    torch.testing.assert_close(together, apart)  # the same sums in another order, and rotary angles further on


@pytest.mark.parametrize("implementation", ["scopes", "iteration", "te"])
def test_packed_training_equals_eager(tmp_path: Path, implementation: str) -> None:
    settings: dict[str, Any] = {
        "dataset__packed_sequence": True,
        "dataset__pad_cu_seqlens": True,
        "model__num_layers": 1,
        "model__seq_length": 32,
        "train__train_iters": 5,
    }
    runs = [
        finetune(tiny(tmp_path, name, **settings), model_provider=gpt, device="cpu", quiet=True)
        for name in ("eager", implementation)
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[1].replays > 0


# -- optimizer and policy


def test_schedule_warms_up_and_falls() -> None:
    schedule = Schedule(1.0, 0.1, warmup_iters=4, decay_iters=10)
    rates = [schedule.at(iteration) for iteration in range(12)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[10] == rates[11] == pytest.approx(0.1)
    assert Schedule(1.0, style="linear", decay_iters=4).at(2) == 0.5
    assert Schedule(1.0, style="constant").at(99) == 1.0
    assert Schedule(1.0, style="inverse-square-root", warmup_iters=4, decay_iters=9).at(15) == 0.5


def test_adamw_decays_matrices_only_and_clips() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = make_adamw(model.parameters(), 0.1, (0.9, 0.99), 1e-8, 0.5)
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [(0.5, 1), (0.0, 1)]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = clip_gradients(list(model.parameters()), 1.0)
    assert norm is not None
    assert float(norm) == pytest.approx(8**0.5)
    assert float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()) == pytest.approx(1.0)
    assert clip_gradients(list(model.parameters()), 0.0) is None


def test_policy_of_capture_and_intervals() -> None:
    due = [capture_is_due(step, 10, 3, was_decided=False) for step in (10, 12, 13, 20)]
    assert due == [False, False, True, True]
    assert not capture_is_due(20, 10, 3, was_decided=True)
    assert capture_is_due(0, 0, 0, was_decided=False)
    assert capture_fits(100, 100)
    assert capture_fits(100, None)
    assert "0 MiB are free" in capture_fits(2**30, 100).reason
    assert predicted_graph_bytes(activation_bytes=1000, microbatches_in_flight=4) == 4400
    assert predicted_graph_bytes(activation_bytes=1000, microbatches_in_flight=4, is_whole_iteration=True) == 1100
    assert [is_time(step, 3, 7) for step in range(1, 8)] == [False, False, True, False, False, True, True]
    assert not is_time(4, None, 4)
