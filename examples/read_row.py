"""Read one expert's row from the bundled model, straight from the memory map, and say where its bytes lie."""

from pathlib import Path

from formats.reader import open_ftw

MODEL = Path(__file__).parent / "tiny_k3"


def main(layer: int = 1, expert: int = 7) -> None:
    reader = open_ftw(MODEL)
    print(f"{reader.layers} layers of {reader.experts} experts in {reader.quant_format}")
    for bank in reader.banks:
        row = reader.expert_row(bank, layer, expert)
        places = ", ".join(f"{file} + {offset}" for file, offset, _ in reader.row_extents(bank, layer, expert))
        print(f"{bank:>16}: {row.nbytes:6} bytes at {places}, first {row.reshape(-1)[:4]}")


if __name__ == "__main__":
    main()
