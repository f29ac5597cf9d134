"""The reference Transformer compiled for any size, exported, padded, and with arguments that do not fit."""

from __future__ import annotations

import pytest
import torch

from normkit.placement import known
from normkit.residual import KeyValueCache, Transformer, init_for
from normkit.residual.branch import Residual
from normkit.spec import TORCH_LAYER

SMALL = {"vocab": 50, "dim": 32, "heads": 4, "depth": 2}


def tokens(batch=2, length=6):
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(5))


def model(**fields):
    torch.manual_seed(0)
    return Transformer(**SMALL | fields)


def counting():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    return graphs, backend


def test_one_graph_for_many_sizes():
    made = model()
    torch._dynamo.reset()
    graphs, backend = counting()
    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=backend)
    for shape in ((2, 6), (3, 5), (4, 9), (2, 12)):
        torch.testing.assert_close(compiled(tokens(*shape)), made(tokens(*shape)))
    assert len(graphs) == 1


def test_compiled_decoding_compiles_no_graph_a_token():
    made = model()
    torch._dynamo.reset()
    graphs, backend = counting()
    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=backend)
    t, cache = tokens(2, 9), KeyValueCache()
    parts = [compiled(t[:, :3], cache=cache)] + [compiled(t[:, n : n + 1], cache=cache) for n in range(3, 9)]
    torch.testing.assert_close(torch.cat(parts, 1), made(t))
    assert len(graphs) <= 3  # the first call, one token, one token with the cache's length free


@pytest.mark.parametrize("fields", [{}, {"attention_softcap": 2.0, "windows": (3, None)}, {"placement": "resi_dual"}])
def test_export_for_any_size(fields):
    made = model(**fields).eval()
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=4, max=512)}
    exported = torch.export.export(made, (tokens(),), dynamic_shapes=(sizes,)).module()
    torch.testing.assert_close(exported(tokens(3, 11)), made(tokens(3, 11)))


@pytest.mark.parametrize("fields", [{}, {"kind": "encoder"}, {"attention_softcap": 2.0}], ids=["", "encoder", "capped"])
def test_a_sample_that_is_all_padding_stays_finite(fields):
    made = model(**fields)
    t, mask = tokens(), torch.ones(2, 6, dtype=torch.bool)
    mask[1] = False
    logits = made(t, mask=mask)
    logits[0].square().mean().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in made.parameters())
    torch.testing.assert_close(logits[:1], made(t[:1]))


@pytest.mark.parametrize("name", known())
def test_one_token_and_no_sample(name):
    made = model(placement=name, depth=1).eval()
    assert made(tokens(0, 4)).shape == (0, 4, 50)
    torch.testing.assert_close(made(tokens(2, 1))[:1], made(tokens(2, 1)[:1]))
    made(tokens(0, 4)).sum().backward()


def test_generation_stops_at_the_last_learned_position():
    """The refusal comes before anything is written: the cache can still be used."""
    made = model(positions="learned", max_positions=4).eval()
    cache = KeyValueCache()
    made(tokens(1, 4), cache=cache)
    with pytest.raises(ValueError, match="5 positions exceed max_positions=4"):
        made(tokens(1, 1), cache=cache)
    assert cache.length == 4


@pytest.mark.parametrize("name", ["pre", "deepnorm", "resi_dual"])
def test_state_dicts_of_other_placements(name):
    """Norms in other slots are other keys, and loading says so."""
    with pytest.raises(RuntimeError, match=r"(Missing|Unexpected) key"):
        model(placement=name).load_state_dict(model(placement="sandwich").state_dict())


def test_distributed(tmp_path):
    """DDP and layer by layer FSDP2 on one process: the same logits, and every parameter gets its gradient."""
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for name in ("pre", "resi_dual", "hybrid", "fixup"):
            made = model(placement=name)
            parallel = torch.nn.parallel.DistributedDataParallel(made)
            torch.testing.assert_close(parallel(tokens()), made(tokens()))
            for _ in range(2):  # a parameter without gradient would be reported by the second step
                parallel(tokens()).square().mean().backward()
            assert all(p.grad is not None for p in made.parameters())
            want = made(tokens()).detach()
            for layer in made.stack.layers:
                fully_shard(layer)
            fully_shard(made)
            got = made(tokens())
            torch.testing.assert_close(got, want)
            got.square().mean().backward()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 20}, "head_dim=5 must be even for rotary positions"),
        ({"head_dim": 0}, "head_dim must be an integer >= 1; got 0"),
        ({"ffn_dim": 0}, "ffn_dim must be an integer >= 1; got 0"),
        ({"kv_heads": 0}, "kv_heads must be an integer >= 1; got 0"),
        ({"kind": "encoder_decoder", "encoder_depth": 0}, "encoder_depth must be an integer >= 1; got 0"),
        ({"token_types": -1}, "token_types must be an integer >= 0; got -1"),
        ({"windows": 3}, "windows must hold None or sizes >= 1; got 3"),
        ({"rope_theta": 0.0}, "rope_theta must be a finite number > 0; got 0.0"),
        ({"attention_softcap": 0.0}, "attention_softcap must be a finite number > 0; got 0.0"),
        ({"logit_softcap": -1.0}, "logit_softcap must be a finite number > 0; got -1.0"),
        ({"embedding_std": -1.0}, "embedding_std must be a finite number >= 0; got -1.0"),
        ({"base": "normal"}, "base must be 'xavier_normal'"),
        ({"base": -1.0}, "base must be 'xavier_normal'.*a standard deviation >= 0; got -1.0"),
        ({"base": True}, "base must be 'xavier_normal'"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        model(**fields)


def test_a_norm_that_is_no_spec():
    with pytest.raises(TypeError, match="norm must be a NormSpec; got str"):
        model(norm="rms")
    with pytest.raises(ValueError, match="norm must be over the last dim of each token"):
        model(norm=TORCH_LAYER.replace(axes="batch", channel_dim=1))


def test_bad_calls():
    made, pair = model(), model(kind="encoder_decoder")
    t = tokens()
    for call, message in (
        (lambda: made(t, types=t), "types needs token_types >= 1"),
        (lambda: made(t, source_mask=t), "source_mask needs kind='encoder_decoder'"),
        (lambda: made(t, mask=torch.ones(2, 5)), r"mask must be \(2, 6\), batch and positions; got shape \(2, 5\)"),
        (lambda: made(t, mask=torch.ones(6)), r"mask must be \(2, 6\)"),
        (lambda: made(t, mask=torch.ones(3, 6)), r"mask must be \(2, 6\)"),
        (lambda: pair(t, source=t, source_mask=torch.ones(2, 5)), r"source_mask must be \(2, 6\)"),
        (lambda: pair(t, source=t[:1]), r"source has 1 samples and tokens 2"),
        (lambda: model(kind="encoder")(t, cache=KeyValueCache()), "a cache needs a decoder"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"tokens must be integers; got torch\.float32"):
        made(t.float())
    cache = KeyValueCache()
    made(t, cache=cache)
    with pytest.raises(ValueError, match=r"mask must be \(2, 7\)"):
        made(t[:, :1], mask=torch.ones(2, 1), cache=cache)
    with pytest.raises(ValueError, match="the cache holds 2 samples and tokens 1"):
        made(t[:1, :1], cache=cache)
    assert cache.length == 6


def test_bad_initialization():
    branch = Residual(torch.nn.Linear(4, 4), "pre", 4)
    with pytest.raises(ValueError, match="a standard deviation >= 0; got nan"):
        init_for("pre", 2, branch, base=float("nan"))
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module; got int"):
        init_for("pre", branch, 2)
    with pytest.raises(ValueError, match="depth must be an integer >= 1; got 0"):
        init_for("pre", 0, branch)
