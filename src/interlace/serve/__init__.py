"""Using trained weights, on one device or split over ranks.  Import the module you need.

generate.py     a checkpoint or run folder -> model, tokenizer, configuration; tokens and text from them
cache.py        keys and values of what was read, for sequences of any lengths at once
served.py       a model, or a rank's part of it: reading it, a pass through all ranks, one choice for all
ranks.py        what each rank of `interlace generate` runs
"""
