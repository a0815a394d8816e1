"""Make the bundled model: Kimi K3 scaled down, with made-up weights and a tokenizer of its own, converted to FTW."""

import shutil
import sys
from pathlib import Path

from tiny_tokenizer import train_bpe, write_tokenizer

from engine.presets import KIMI_K3, scale
from engine.tokenizer import SPECIAL_SLOTS
from formats.convert import convert
from formats.synthetic import write_checkpoint

ROOT = Path(__file__).parent.parent
RANKS = 768


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "examples" / "tiny_k3")
    source = out.with_name(f"{out.name}_source")
    config = scale(
        KIMI_K3 | {"bos_token_id": RANKS, "eos_token_id": RANKS + 2, "pad_token_id": RANKS + SPECIAL_SLOTS - 1},
        layers=3, kda_heads=2, kda_head_dim=64, vocab_size=RANKS + SPECIAL_SLOTS, hidden_size=128,
        intermediate_size=256, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=128, kv_lora_rank=128,
        qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, num_experts=32, num_experts_per_token=4,
        moe_intermediate_size=64, routed_expert_hidden_size=64, attn_res_block_size=2, max_position_embeddings=65536,
    )  # fmt: skip
    write_checkpoint(source, config, seed=3, experts="nvfp4", attention="fp8")
    write_tokenizer(source, train_bpe([ROOT.joinpath("LICENSE").read_text()], RANKS))
    convert(source, out)
    shutil.rmtree(source)
    print(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
