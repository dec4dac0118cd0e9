"""What kernels are held to: a fixed list of shapes, a sample of candidates, and the judge of their outputs."""
