"""ResNet-152 as torchvision builds it, within 60 % of its activations. Batch statistics are counted once.

python examples/resnet.py            # a slim one on small images, on any machine
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat

DEPTHS, WIDTH, SIZE, BATCH = (3, 8, 36, 3), 4, 32, 4  # ResNet-152's depths; its width is 64, its size 224


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != 4 * width:
            shortcut = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True)
        )
        inputs, stages = WIDTH, []
        for number, depth in enumerate(DEPTHS):
            width, blocks = WIDTH * 2**number, []
            for place in range(depth):
                blocks.append(Bottleneck(inputs, width, 2 if number and not place else 1))
                inputs = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages, self.fc = nn.Sequential(*stages), nn.Linear(inputs, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.stages(self.stem(images)).mean((2, 3)))


def main() -> None:
    torch.manual_seed(0)
    model, images, labels = ResNet(), torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(0, 10, (BATCH,))
    handle = remat.fit(
        model, images, activations=0.6, loss=lambda output, batch: F.cross_entropy(output, labels)
    )
    print(handle.report())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("batches that the statistics have seen:", model.stem[1].num_batches_tracked.item())


if __name__ == "__main__":
    main()
