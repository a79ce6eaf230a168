"""A convnet with BatchNorm, trained and evaluated through captured steps that share one session.

Run it as it stands: `python examples/convnet.py`. Two things to see: the last batch of an epoch is smaller and simply
gets a graph of its own, and BatchNorm's running statistics advance once a step, as in eager.
"""

import torch
from torch import Tensor, nn

import stepgraph

NUM_CLASSES, NUM_IMAGES, BATCH_SIZE = 4, 144, 32  # the last of five batches has 16 images


def make_images(seed: int) -> tuple[Tensor, Tensor]:
    """Noise with a brighter quadrant, whose number is the label."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(NUM_IMAGES, 3, 16, 16, generator=generator)
    labels = torch.randint(NUM_CLASSES, (NUM_IMAGES,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 8 * (label // 2), 8 * (label % 2)
        image[:, row : row + 8, column : column + 8] += 0.5
    return images, labels


def main() -> None:
    """Train for a few epochs and print losses, accuracy and what was captured."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, NUM_CLASSES)),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def train_step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    @torch.no_grad()
    def count_correct(images: Tensor, labels: Tensor) -> Tensor:
        return (model(images).argmax(dim=1) == labels).sum()

    train_images, train_labels = (t.to(device).split(BATCH_SIZE) for t in make_images(seed=1))
    test_images, test_labels = (t.to(device).split(BATCH_SIZE) for t in make_images(seed=2))

    with stepgraph.Session() as session:  # one memory pool and one stream for both
        train = stepgraph.capture(train_step, session=session)
        evaluate = stepgraph.capture(count_correct, session=session)
        for epoch in range(6):
            model.train()  # the mode belongs to a call's signature; switch it outside the step
            losses = [train(*batch) for batch in zip(train_images, train_labels, strict=True)]
            model.eval()
            correct = [evaluate(*batch) for batch in zip(test_images, test_labels, strict=True)]
            accuracy = torch.stack(correct).sum().item() / NUM_IMAGES
            print(f"epoch {epoch}  loss {torch.stack(losses).mean().item():.4f}  accuracy {accuracy:.2f}")
        print(train.report())
        print(evaluate.report())


if __name__ == "__main__":
    main()
