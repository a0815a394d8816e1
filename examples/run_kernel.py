"""Run one kernel, RMS normalisation, on the card or in Triton's interpreter, and compare it with float64."""

from engine.device import open_device

device = open_device()

import torch  # noqa: E402

from ops.norm import rms_norm  # noqa: E402


def main() -> None:
    x_td = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).to(device)
    w_d = torch.linspace(0.5, 1.5, 96, device=device)
    y_td = rms_norm(x_td, w_d, 1e-5)
    x = x_td.double()
    want = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * w_d.double()
    error = ((y_td.double() - want).norm() / want.norm()).item()
    print(f"rms_norm on {device}: relative error {error:.1e}")


if __name__ == "__main__":
    main()
