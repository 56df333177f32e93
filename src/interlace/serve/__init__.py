"""Using trained weights, on one device so far.  Import the module you need.

generate.py     a checkpoint or run folder -> model, tokenizer, configuration; tokens and text from them
"""
