"""What the benchmark of fused products measures, and how it is judged."""
