"""Classify handwritten digits: python digits.py. Kill it, and run it again, as you like."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample

from helios import DataLoaderParams, DataModule, Model, Trainer

EPOCHS, STEPS_PER_EPOCH = 20, 40


class Digits(torch.utils.data.Dataset[Any]):
    def __init__(self, images: Tensor, labels: Tensor, is_augmented: bool = False) -> None:
        self.images, self.labels, self.is_augmented = images, labels, is_augmented

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        image = self.images[index]
        if self.is_augmented:  # turned, shifted and made noisy, anew each time
            turn, right, down = (torch.rand(3) - 0.5) * torch.tensor([0.5, 0.3, 0.3])
            rows = torch.stack((turn.cos(), -turn.sin(), right, turn.sin(), turn.cos(), down))
            grid = affine_grid(rows.view(1, 2, 3), [1, 1, 8, 8], align_corners=False)
            image = grid_sample(image[None], grid, align_corners=False)[0]
            image = image + 0.05 * torch.randn(1, 8, 8)
        return image, self.labels[index], index


class DigitsData(DataModule):
    def __init__(self, num_replicas: int = 1) -> None:
        super().__init__()
        self.batch_size = 32 // num_replicas  # of one replica: a step sees 32 images in all

    def load(self) -> tuple[Tensor, Tensor]:
        images, labels = load_digits(return_X_y=True)
        return torch.from_numpy(images), torch.from_numpy(labels)

    def setup(self) -> None:
        x, y = self.load()
        x = x.float().view(-1, 1, 8, 8) / 16
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        train, valid, test = order.split((1280, 157, 360))
        params = DataLoaderParams(batch_size=self.batch_size, shuffle=True, num_workers=2)
        self.train_dataset = self.create_dataset(Digits(x[train], y[train], True), params)
        whole = DataLoaderParams(batch_size=360)
        self.valid_dataset = self.create_dataset(Digits(x[valid], y[valid]), whole)
        self.test_dataset = self.create_dataset(Digits(x[test], y[test]), whole)


class DigitsModel(Model):
    def setup(self) -> None:
        convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()]
        head = [nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 10)]
        self.network = nn.Sequential(*convolutions, *head)
        self.optimizer = torch.optim.AdamW(self.network.parameters())
        schedule, steps = torch.optim.lr_scheduler.OneCycleLR, EPOCHS * STEPS_PER_EPOCH
        self.scheduler = schedule(self.optimizer, max_lr=0.006, total_steps=steps)

    def train_step(self, batch: Any) -> Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def valid_step(self, batch: Any) -> None:
        is_right = self.network(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", is_right.double().mean())


def main(max_epochs: int = EPOCHS) -> float:
    trainer = Trainer(max_epochs=max_epochs, chkpt_root="runs", use_cpu=True)
    trainer.fit(DigitsModel("digits"), DigitsData())
    return trainer.test(DigitsModel("digits"), DigitsData())["accuracy"]


if __name__ == "__main__":
    print(f"Test accuracy: {main():.2%}")
