"""A training stack as the tests of docs/silent-errors.md call it, and what they compare it with.

The six functions up to `gradient_norm` are specific to this library. To test another stack, copy
this file and replace them. The others are a reference in plain PyTorch, a small model, and a
comparison.

Everything is float64, in which sums of these sizes round by about 1e-15 of the largest entry. So a
bound of 1e-10 separates rounding from faults. In float32 use 1e-4. Rounding in bfloat16 hides small
faults.
"""

import copy
import math

import torch

from bmt_burst import (
    Chunks,
    Layout,
    Mask,
    SequenceParallel,
    burst_attn_func,
    shift_labels,
    simulate,
)
from models.config import CPMConfig
from models.cpm import CPM
from train.engine.common import square_sum

RANKS = 3


def attend(q, k, v, borders, window=None, sinks=None, sparse=None, with_lse=False):
    """Return causal attention of whole tensors (1, S, H, D), computed by RANKS ranks.

    Documents lie between borders, such as (0, 9, 24). Later tokens are padding. With with_lse also
    return the logsumexp of the scores, (1, H, S).
    """
    mask = Mask(q.shape[1], Mask.documents(borders, window=window).slices)
    layout = Layout.zigzag(q.shape[1], RANKS)
    options = {"mask": mask, "layout": layout, "sinks": sinks, "sparse": sparse}

    def work(ring):
        mine = [layout.shard(x, ring.rank) for x in (q, k, v)]
        return burst_attn_func(*mine, process_group=ring, return_lse=True, **options)

    outs, lses = zip(*simulate(RANKS, work), strict=True)
    out = layout.unshard(outs)
    return (out, layout.unshard(lses, dim=2)) if with_lse else out


def attend_in_chunks(q, k, v, tokens):
    """Return causal attention of whole tensors (1, S, H, D), computed in chunks of some tokens."""
    layout = Layout.chunks(q.shape[1], RANKS, tokens)

    def work(ring):
        sp = SequenceParallel(ring.rank, RANKS, process_group=ring)
        chunks = Chunks(Mask.causal(q.shape[1]), tokens, layers=1, sp=sp)
        mine = [[chunk.shard(x) for x in (q, k, v)] for chunk in chunks.chunks]
        outs = [chunk.attend(0, *mine[chunk.number]) for chunk in chunks.forward(last=True)]
        return torch.cat(outs, 1)

    return layout.unshard(simulate(RANKS, work))


def mean_loss(x, loss):
    """Return the mean over ranks of loss(mine, whole), as data parallelism averages it.

    `mine` are a rank's tokens of x (1, S, E). `whole` are those that it gathers from all ranks.
    """

    def work(ring):
        sp = SequenceParallel(ring.rank, RANKS, process_group=ring)
        mine = sp.shard(x)
        return loss(mine, sp.unshard(mine, x.shape[1]))

    return sum(simulate(RANKS, work)) / RANKS


def rank_inputs(tokens, borders, ranks=RANKS, prompt=0):
    """Return the model's inputs on each rank: tokens, positions and labels, (1, S_local) each.

    The first `prompt` tokens of the sequence are no targets: their labels are -100.
    """
    mask = Mask.documents(borders)
    labels = shift_labels(tokens, mask=mask)
    labels[:, :prompt] = -100
    whole = tokens, mask.positions().unsqueeze(0), labels
    layout = Layout.zigzag(tokens.shape[1], ranks)
    return [[layout.shard(x, rank) for x in whole] for rank in range(ranks)]


def train_step(model, tokens, borders, ranks=RANKS, prompt=0):
    """Return the loss of a step, and the gradients as the optimizer gets them."""
    inputs = rank_inputs(tokens, borders, ranks, prompt)

    def work(ring):
        mine = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # the same parameters
        mine.attach(SequenceParallel(ring.rank, ranks, process_group=ring))
        return mine(*inputs[ring.rank], mask=Mask.documents(borders))

    losses, targets = zip(*simulate(ranks, work), strict=True)
    loss = sum(losses) / sum(targets)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


def gradient_norm(shards):
    """Return the norm of a gradient that is cut over ranks, as clipping uses it."""
    return math.sqrt(sum(square_sum([shard]) for shard in shards))


def random_qkv(tokens):
    """Return q, k and v with two heads."""
    torch.manual_seed(0)
    return [torch.randn(1, tokens, 2, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]


def changed(tensors, tokens):
    """Return copies that differ in some tokens."""
    copies = [x.detach().clone() for x in tensors]
    for x in copies:
        x[:, tokens] += 1.0
    return copies


def visible(borders, window=None):
    """Return a mask (S, S), True where a query (row) sees a key (column)."""
    at = torch.arange(borders[-1])
    document = torch.bucketize(at, torch.tensor(borders[1:]), right=True)
    distance = at.unsqueeze(1) - at
    seen = (distance >= 0) & (document.unsqueeze(1) == document)
    return seen if window is None else seen & (distance < window)


def scores(q, k, seen):
    """Return the scores (1, H, S, S), -inf where a query does not see a key."""
    every = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return every.masked_fill(~seen, -math.inf)


def dense(q, k, v, seen, sinks=None):
    """Return attention on one device. Sinks (H,) are scores of a key without a value."""
    every = scores(q, k, seen)
    if sinks is not None:
        more = sinks.view(1, -1, 1, 1).expand(*every.shape[:3], 1)
        every = torch.cat((every, more), -1)
    return torch.einsum("bhqk,bkhd->bqhd", every.softmax(-1)[..., : k.shape[1]], v)


def small_model(**options):
    """Return a model of two layers. Its weights are random, and the same in each call."""
    torch.manual_seed(0)
    return CPM(CPMConfig(64, 32, 48, 2, 4, 2, 8, tie_embeddings=False, **options)).double()


def random_tokens(count):
    """Return tokens (1, count), the same in each call."""
    return torch.randint(64, (1, count), generator=torch.Generator().manual_seed(1))


def close(got, expected, bound=1e-10):
    """Whether entries differ by no more than `bound` of the largest one. NaN is not close."""
    return bool((got - expected).abs().max() <= bound * expected.abs().max())
