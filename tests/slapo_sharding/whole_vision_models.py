"""Whole models of images as people write them by hand, each with inputs whose batch and size change."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.slapo_sharding.whole_models import D, H, noise


class Mlp(nn.Module):
    def __init__(self, width=D, hidden=4 * D, out=None):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.0)
        self.norm, self.fc2, self.drop2 = nn.Identity(), nn.Linear(hidden, out or width), nn.Dropout(0.0)

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class VitAttention(nn.Module):
    def __init__(self, fused=True):
        super().__init__()
        self.num_heads, self.head_dim, self.scale, self.fused_attn = H, D // H, (D // H) ** -0.5, fused
        self.qkv, self.q_norm, self.k_norm = nn.Linear(D, D * 3), nn.LayerNorm(D // H), nn.LayerNorm(D // H)
        self.attn_drop, self.proj, self.proj_drop = nn.Dropout(0.0), nn.Linear(D, D), nn.Dropout(0.0)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            x = self.attn_drop(((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.0, D))

    def forward(self, x):
        return x * self.gamma


class VitBlock(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1 = nn.LayerNorm(D), VitAttention(fused), LayerScale(), nn.Identity()
        self.norm2, self.mlp, self.ls2, self.drop_path2 = nn.LayerNorm(D), Mlp(), LayerScale(), nn.Identity()

    def forward(self, x):
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PatchEmbed(nn.Module):
    def __init__(self, patch=4):
        super().__init__()
        self.proj, self.norm = nn.Conv2d(3, D, kernel_size=patch, stride=patch), nn.Identity()

    def forward(self, x):
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class Vit(nn.Module):
    """Positions are interpolated for images of another size."""

    def __init__(self):
        super().__init__()
        self.patch_embed, self.cls_token = PatchEmbed(), nn.Parameter(torch.randn(1, 1, D) * 0.1)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + 16, D) * 0.1)
        self.blocks = nn.Sequential(*(VitBlock(bool(index)) for index in range(2)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 10)

    def positions(self, size):
        first, grid = self.pos_embed[:, :1], self.pos_embed[:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(size, size), mode="bicubic", antialias=True)
        return torch.cat([first, grid.permute(0, 2, 3, 1).reshape(1, size * size, -1)], dim=1)

    def forward(self, x):
        size = x.shape[-1] // 4
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions(size)
        return self.head(self.norm(self.blocks(x))[:, 0])

    @staticmethod
    def inputs(batch, length, seed):
        return {"x": noise(batch, 3, 2 * length, 2 * length, seed=seed)}


def windows_of(x, size):
    B, rows, columns, C = x.shape
    x = x.view(B, rows // size, size, columns // size, size, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, C)


def image_of(windows, size, rows, columns):
    C = windows.shape[-1]
    x = windows.view(-1, rows // size, columns // size, size, size, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, rows, columns, C)


class WindowAttention(nn.Module):
    def __init__(self, dim, heads, size):
        super().__init__()
        self.num_heads, self.scale, self.size = heads, (dim // heads) ** -0.5, size
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * size - 1) ** 2, heads) * 0.3)
        grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        relative = (grid[:, :, None] - grid[:, None]).permute(1, 2, 0) + size - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * size - 1) + relative[..., 1])
        self.qkv, self.proj, self.softmax = nn.Linear(dim, dim * 3), nn.Linear(dim, dim), nn.Softmax(dim=-1)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(self.size**2, self.size**2, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            number = mask.shape[0]
            attn = attn.view(B_ // number, number, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        return self.proj((self.softmax(attn) @ v).transpose(1, 2).reshape(B_, N, C))


class SwinBlock(nn.Module):
    def __init__(self, dim, heads, shift):
        super().__init__()
        self.window, self.shift = 2, shift
        self.norm1, self.attn = nn.LayerNorm(dim), WindowAttention(dim, heads, 2)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 4 * dim)

    def mask(self, rows, columns):
        regions, number = torch.zeros(1, rows, columns, 1), 0
        cuts = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        for across in cuts:
            for along in cuts:
                regions[:, across, along, :] = number
                number += 1
        found = windows_of(regions, self.window).view(-1, self.window * self.window)
        return (found.unsqueeze(1) - found.unsqueeze(2)).ne(0) * -100.0

    def forward(self, x):
        B, rows, columns, C = x.shape
        shortcut, x = x, self.norm1(x)
        if self.shift:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        given = windows_of(x, self.window).view(-1, self.window * self.window, C)
        given = self.attn(given, mask=self.mask(rows, columns) if self.shift else None)
        x = image_of(given.view(-1, self.window, self.window, C), self.window, rows, columns)
        if self.shift:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x):
        parts = [x[:, 0::2, 0::2, :], x[:, 1::2, 0::2, :], x[:, 0::2, 1::2, :], x[:, 1::2, 1::2, :]]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Swin(nn.Module):
    """Two stages of shifted windows."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, D, 2, 2)
        stages = [(SwinBlock(dim, heads, 0), SwinBlock(dim, heads, 1)) for dim, heads in ((D, H), (2 * D, 2 * H))]
        self.layers = nn.ModuleList(nn.ModuleList(blocks) for blocks in stages)
        self.downsample, self.norm, self.head = PatchMerging(D), nn.LayerNorm(2 * D), nn.Linear(2 * D, 10)

    def forward(self, x):
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        for number, blocks in enumerate(self.layers):
            x = self.downsample(x) if number else x
            for block in blocks:
                x = block(x)
        return self.head(self.norm(x).mean((1, 2)))

    @staticmethod
    def inputs(batch, length, seed):
        return {"x": noise(batch, 3, 2 * length, 2 * length, seed=seed)}


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DitBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(D, elementwise_affine=False), VitAttention()
        self.norm2, self.mlp = nn.LayerNorm(D, elementwise_affine=False), Mlp()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class TimestepEmbedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, D), nn.SiLU(), nn.Linear(D, D))

    def forward(self, t):
        freqs = torch.exp(-math.log(10000) * torch.arange(8, dtype=torch.float32) / 8)
        args = t[:, None].float() * freqs[None]
        return self.mlp(torch.cat([args.cos(), args.sin()], dim=-1))


class Dit(nn.Module):
    """A diffusion transformer whose norms are modulated by the time and the class."""

    def __init__(self):
        super().__init__()
        self.x_embedder, self.t_embedder, self.y_embedder = PatchEmbed(), TimestepEmbedder(), nn.Embedding(11, D)
        self.blocks = nn.ModuleList(DitBlock() for _ in range(2))
        self.norm_final, self.linear = nn.LayerNorm(D, elementwise_affine=False), nn.Linear(D, 4 * 4 * 3)
        self.final_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 2 * D))

    def forward(self, x, t, y):
        side = x.shape[-1] // 4
        c, x = self.t_embedder(t) + self.y_embedder(y), self.x_embedder(x)
        for block in self.blocks:
            x = block(x, c)
        x = self.linear(modulate(self.norm_final(x), *self.final_modulation(c).chunk(2, dim=1)))
        x = torch.einsum("nhwpqc->nchpwq", x.reshape(x.shape[0], side, side, 4, 4, 3))
        return x.reshape(x.shape[0], 3, side * 4, side * 4)

    @staticmethod
    def inputs(batch, length, seed):
        given = torch.Generator().manual_seed(seed)
        steps, labels = (torch.randint(0, most, (batch,), generator=given) for most in (1000, 11))
        return {"x": noise(batch, 3, 2 * length, 2 * length, seed=seed), "t": steps, "y": labels}


class ResBlock(nn.Module):
    def __init__(self, inside, out):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inside), nn.Conv2d(inside, out, 3, padding=1)
        self.time, self.norm2 = nn.Linear(4 * D, out), nn.GroupNorm(4, out)
        self.conv2, self.skip = nn.Conv2d(out, out, 3, padding=1), nn.Conv2d(inside, out, 1)

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class SpatialAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(4, width), H
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, c, rows, columns = x.shape
        h = self.norm(x).view(b, c, -1).transpose(1, 2)
        q, k, v = (t.reshape(b, -1, self.heads, c // self.heads).transpose(1, 2) for t in self.to_qkv(h).chunk(3, dim=-1))
        h = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, c))
        h = h + self.ff(h)
        return x + h.transpose(1, 2).reshape(b, c, rows, columns)


class UNet(nn.Module):
    """Convolutions down and up again, with skips and attention at the bottom."""

    def __init__(self):
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(8, 4 * D), nn.SiLU(), nn.Linear(4 * D, 4 * D))
        self.stem, self.down1, self.down2 = nn.Conv2d(3, 16, 3, padding=1), ResBlock(16, 16), ResBlock(16, D)
        self.pool, self.mid1, self.attn, self.mid2 = (
            nn.Conv2d(16, 16, 3, 2, 1),
            ResBlock(D, D),
            SpatialAttention(D),
            ResBlock(D, D),
        )
        self.up1, self.up2 = ResBlock(2 * D, 16), ResBlock(32, 16)
        self.upsample, self.out = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(16, 3, 1)

    def forward(self, x, t):
        freqs = 100 ** -(torch.arange(4) / 4)
        t = self.time_mlp(torch.cat([(t[:, None] * freqs).sin(), (t[:, None] * freqs).cos()], dim=-1))
        first = self.down1(self.stem(x), t)
        second = self.down2(self.pool(first), t)
        x = self.mid2(self.attn(self.mid1(second, t)), t)
        x = self.upsample(self.up1(torch.cat([x, second], dim=1), t))
        return self.out(self.up2(torch.cat([x, first], dim=1), t))

    @staticmethod
    def inputs(batch, length, seed):
        return {"x": noise(batch, 3, length, length, seed=seed), "t": noise(batch, seed=seed)}


class DetrLayer(nn.Module):
    def __init__(self, cross):
        super().__init__()
        self.self_attn, self.norm1 = nn.MultiheadAttention(D, H, batch_first=True), nn.LayerNorm(D)
        self.cross_attn = nn.MultiheadAttention(D, H, batch_first=True) if cross else None
        self.norm2 = nn.LayerNorm(D) if cross else None
        self.linear1, self.linear2, self.norm3 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.LayerNorm(D)

    def forward(self, x, pos, memory=None, memory_pos=None):
        x = self.norm1(x + self.self_attn(x + pos, x + pos, value=x)[0])
        if self.cross_attn is not None:
            x = self.norm2(x + self.cross_attn(query=x + pos, key=memory + memory_pos, value=memory)[0])
        return self.norm3(x + self.linear2(F.relu(self.linear1(x))))


class BoxMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 4)))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if number < len(self.layers) - 1 else layer(x)
        return x


class Detr(nn.Module):
    """Queries of boxes look at an image; attention is torch's own."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU())
        self.conv, self.query_pos = nn.Conv2d(16, D, 1), nn.Parameter(torch.randn(10, D))
        self.row_embed, self.col_embed = nn.Parameter(torch.randn(50, D // 2)), nn.Parameter(torch.randn(50, D // 2))
        self.encoder = nn.ModuleList(DetrLayer(False) for _ in range(2))
        self.decoder = nn.ModuleList(DetrLayer(True) for _ in range(2))
        self.linear_class, self.bbox_embed = nn.Linear(D, 6), BoxMlp()

    def forward(self, inputs):
        h = self.conv(self.backbone(inputs))
        rows, columns = h.shape[-2:]
        pos = [
            self.col_embed[:columns].unsqueeze(0).repeat(rows, 1, 1),
            self.row_embed[:rows].unsqueeze(1).repeat(1, columns, 1),
        ]
        pos, memory = torch.cat(pos, dim=-1).flatten(0, 1).unsqueeze(0), h.flatten(2).permute(0, 2, 1)
        for layer in self.encoder:
            memory = layer(memory, pos)
        queries = self.query_pos.unsqueeze(0).repeat(inputs.shape[0], 1, 1)
        x = torch.zeros_like(queries)
        for layer in self.decoder:
            x = layer(x, queries, memory, pos)
        return {"pred_logits": self.linear_class(x), "pred_boxes": self.bbox_embed(x).sigmoid()}

    @staticmethod
    def inputs(batch, length, seed):
        return {"inputs": noise(batch, 3, 2 * length, 2 * length, seed=seed)}


class MixerBlock(nn.Module):
    def __init__(self, patches):
        super().__init__()
        self.norm1, self.mlp_tokens = nn.LayerNorm(D), Mlp(patches, 32)
        self.norm2, self.mlp_channels = nn.LayerNorm(D), Mlp()

    def forward(self, x):
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class Mixer(nn.Module):
    """MLPs over patches, of which there is a fixed number, and over channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.blocks = PatchEmbed(), nn.Sequential(MixerBlock(16), MixerBlock(16))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 10)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x))).mean(dim=1))

    @staticmethod
    def inputs(batch, length, seed):
        return {"x": noise(batch, 3, 16, 16, seed=seed)}
