"""A character language model of Python's own documentation: python character_model.py."""

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helios import DataModule, Model, Trainer

TEXT = "\n".join(topics.values())
LETTERS = sorted(set(TEXT))
LENGTH = 64


class Windows(torch.utils.data.Dataset[Tensor]):
    """Pieces of a text: LENGTH characters, and the one that follows them."""

    def __init__(self, text: str) -> None:
        numbers = {letter: number for number, letter in enumerate(LETTERS)}
        self.codes = torch.tensor([numbers[letter] for letter in text])

    def __len__(self) -> int:
        return (len(self.codes) - 1) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self.codes[index * LENGTH : (index + 1) * LENGTH + 1]


class CharacterModel(Model):
    def setup(self) -> None:
        self.embedding = nn.Embedding(len(LETTERS), 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.position = nn.Parameter(torch.randn(LENGTH, 32, device=self.device) / 10)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, len(LETTERS))
        networks = (self.embedding, self.encoder, self.head)
        parameters = [p for network in networks for p in network.parameters()]
        self.optimizer = torch.optim.AdamW([self.position, *parameters], lr=3e-3)

    def predict(self, codes: Tensor) -> Tensor:
        length = codes.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        inputs = self.embedding(codes) + self.position[:length]
        return self.head(self.encoder(inputs, mask=mask, is_causal=True))

    def train_step(self, batch: Tensor) -> Tensor:
        return cross_entropy(self.predict(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def valid_step(self, batch: Tensor) -> None:
        self.log("bits per character", self.train_step(batch) / torch.log(torch.tensor(2.0)))


def main(max_epochs: int = 3) -> float:
    split = len(TEXT) * 9 // 10
    data = DataModule.from_datasets(
        train=Windows(TEXT[:split]), valid=Windows(TEXT[split:]), batch_size=32
    )
    trainer = Trainer(max_epochs=max_epochs, chkpt_root="runs")
    trainer.fit(CharacterModel(), data)
    return trainer.validate(CharacterModel(), data)["bits per character"]


if __name__ == "__main__":
    print(f"{main():.2f} bits per character")
