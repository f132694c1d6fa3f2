"""A Wide-ResNet of bottlenecks, and a narrow residual network of basic blocks, with the structure that torchvision's have."""

from __future__ import annotations

import torch
from torch import nn


class Bottleneck(nn.Module):
    """Three convolutions, the middle one wide, around a shortcut."""

    def __init__(self, channels: int, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, out, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        inner = self.relu(self.bn1(self.conv1(x)))
        inner = self.relu(self.bn2(self.conv2(inner)))
        return self.relu(self.bn3(self.conv3(inner)) + shortcut)


class BasicBlock(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, channels: int, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, out, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        inner = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(inner)) + shortcut)


class WideResNet(nn.Module):
    """Four lists of blocks between a stem and a classifier; the loss is the model's own."""

    def __init__(self, block: type[nn.Module] = Bottleneck, depths: tuple[int, ...] = (1, 2, 2, 1)) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        channels = 4
        for number, depth in enumerate(depths, 1):
            out, blocks = 4 * number, []
            for index in range(depth):
                blocks.append(block(channels, 8 * number, out, 2 if number > 1 and index == 0 else 1))
                channels = out
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _shortcut(channels: int, out: int, stride: int) -> nn.Module | None:
    if channels == out and stride == 1:
        return None
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
