"""What a parallel plan costs and whether it can run, from integers alone: no torch, no process, no GPU."""
