"""One decoder on one device, with the switches of its family: single-device code that knows no process groups.

    Decoder(cfg)                     the model                                  decoder.py
    initialise(model, cfg, seed)     its first values, the same for every plan  decoder.py
    load_hf(folder), save_hf(...)    weights from and to Hugging Face           weights.py

`layers.py`, `attention.py` and `moe.py` hold the parts; `stage.py` leaves those of other stages of a pipeline out;
`presets/` has the sizes that have a name.
"""

from interlace.models.decoder import Decoder, initial_value, initialise
from interlace.models.weights import load_hf, save_hf

__all__ = ["Decoder", "initial_value", "initialise", "load_hf", "save_hf"]
