"""What a run or a plan amounted to, as accounts and pictures.  Standard library only; import the module you need.

ledger.py    events -> an account of each rank's step that sums to it (spans.py: sets of moments)
source.py    run folders, files of events, traces -> events
trace.py     torch.profiler's traces of any program -> events (kernels.py: what a kernel was)
table.py     ledgers as words and plain values
timeline.py  events as a picture, simulated and real ones alike
page.py      all of it as one HTML file
draw.py      the loss curve of a run (svg.py: marks that both pictures use)
"""
