"""Models whose layers read the K and V of another layer (CLA, YOCO, LCKV, Gemma 3n), and a plain decoder for them."""
