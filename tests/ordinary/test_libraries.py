"""Networks and tools of other libraries: transformers, torch_geometric, torchmetrics.

They are imported by the tests that use them, for that takes seconds.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from helios.state import TrainingState
from tests.ordinary.harness import LENGTH, Case, Data, Regression, assert_ordinary

WORDS = 17
with_graphs = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script:DeprecationWarning",
    "ignore:.*typing._eval_type:DeprecationWarning",  # from Python 3.13 on
)
"""torch_geometric uses both."""


class Gpt2(Regression):
    """A tiny GPT-2, with the learning rate that transformers warms up."""

    def setup(self, fast_init: bool = False) -> None:
        from transformers import get_linear_schedule_with_warmup

        super().setup(fast_init)
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, 3, 20)

    def make_net(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False
        )
        return GPT2LMHeadModel(config)

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=0.01)

    def loss(self, batch: Any) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss


class Bert(Gpt2):
    """A tiny BERT that guesses hidden words."""

    def make_net(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = BertConfig(
            vocab_size=WORDS, intermediate_size=32, max_position_embeddings=8, **sizes
        )
        return BertForMaskedLM(config)

    def loss(self, batch: Any) -> Tensor:
        is_hidden = torch.rand(batch[0].shape) < 0.3
        is_hidden[:, 0] = True
        inputs = batch[0].masked_fill(is_hidden, 0)
        labels = batch[0].masked_fill(~is_hidden, -100)
        return self.net(input_ids=inputs, labels=labels).loss


def sentences() -> TensorDataset:
    """Return sentences of eight words."""
    return TensorDataset(torch.arange(LENGTH * 8).reshape(LENGTH, 8) ** 2 % (WORDS - 1) + 1)


@pytest.mark.parametrize("kind", [Gpt2, Bert])
def test_a_language_model_resumes_without_a_warning(kind: type[Regression], tmp_path: Path) -> None:
    assert_ordinary(Case(kind, partial(Data, sentences)), tmp_path)


class OneGraph(Regression):
    """A graph network over one graph that the model holds; batches are nodes."""

    def setup(self, fast_init: bool = False) -> None:
        from torch_geometric.data import Data as Graph

        nodes = torch.arange(LENGTH)
        edges = torch.stack([nodes, (nodes * 3 + 1) % LENGTH])
        self.graph = Graph(x=torch.eye(LENGTH), edge_index=edges, y=nodes % 2)
        super().setup(fast_init)

    def make_net(self) -> nn.Module:
        from torch_geometric.nn import GCN

        return GCN(LENGTH, 4, num_layers=2, out_channels=2, dropout=0.3, norm="batch")

    def loss(self, batch: Any) -> Tensor:
        found = self.net(self.graph.x, self.graph.edge_index)[batch[0]]
        return nn.functional.cross_entropy(found, self.graph.y[batch[0]])


class ManyGraphs(Regression):
    """A network that sorts graphs."""

    def make_net(self) -> nn.Module:
        from torch_geometric.nn import GATConv

        return GATConv(3, 2, dropout=0.2)

    def loss(self, batch: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        found = global_mean_pool(self.net(batch.x, batch.edge_index), batch.batch)
        return nn.functional.cross_entropy(found, batch.y)


def graphs() -> list[Any]:
    """Return small rings of nodes."""
    from torch_geometric.data import Data as Graph

    found = []
    for number in range(LENGTH):
        nodes = torch.arange(3 + number % 3)
        edges = torch.stack([nodes, nodes.roll(1)])
        features = torch.sin(torch.outer(nodes + number, torch.arange(1.0, 4.0)))
        found.append(Graph(x=features, edge_index=edges, y=torch.tensor([number % 2])))
    return found


def joined_graphs() -> dict[str, Any]:
    """Return the options of a loader that joins graphs as torch_geometric does."""
    from torch_geometric.data import Batch

    return {"batch_size": 2, "shuffle": True, "collate_fn": Batch.from_data_list}


@with_graphs
def test_a_network_of_one_graph_resumes_without_a_warning(tmp_path: Path) -> None:
    nodes = partial(Data, lambda: TensorDataset(torch.arange(LENGTH)))
    assert_ordinary(Case(OneGraph, nodes), tmp_path)


@with_graphs
def test_a_network_of_many_graphs_resumes_without_a_warning(tmp_path: Path) -> None:
    assert_ordinary(Case(ManyGraphs, partial(Data, graphs, joined_graphs)), tmp_path)


class Measured(Regression):
    """Measures itself by torchmetrics: one metric, a collection, a running mean."""

    def setup(self, fast_init: bool = False) -> None:
        from torchmetrics import MeanMetric, MetricCollection
        from torchmetrics.regression import MeanAbsoluteError, PearsonCorrCoef

        super().setup(fast_init)
        self.error = MeanAbsoluteError()
        self.scores = MetricCollection([MeanAbsoluteError(), PearsonCorrCoef()])
        self.mean = MeanMetric()

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        found = self.net(inputs)
        if torch.is_grad_enabled():
            self.error(found.detach(), targets)
            self.scores.update(found.detach()[:, 0], targets[:, 0])
        return super().loss(batch)

    def on_training_batch_end(self, state: TrainingState, should_log: bool = False) -> None:
        super().on_training_batch_end(state, should_log)
        self.mean.update(self.loss_items["loss"])
        if state.global_iteration % 5 == 0:
            self.mean.reset()

    def on_training_epoch_end(self, current_epoch: int) -> None:
        self.error.compute()
        self.error.reset()


def test_torchmetrics_among_the_attributes_resume_without_a_warning(tmp_path: Path) -> None:
    assert_ordinary(Case(Measured, options=lambda _: {"valid_frequency": 4}), tmp_path)


@pytest.mark.full
def test_the_demo_resumes_without_a_warning(tmp_path: Path) -> None:
    from scripts.train_digits import DigitsData, DigitsModel

    case = Case(lambda: DigitsModel("digits"), DigitsData, lambda _: {"valid_frequency": 6})
    assert_ordinary(case, tmp_path)
