"""What a run or a plan amounted to, as pictures.  Standard library only; import the module you need.

draw.py    the loss curve of a run, as SVG
"""
