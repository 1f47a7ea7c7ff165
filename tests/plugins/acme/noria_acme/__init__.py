"""The Acme 1000, an imaginary device that computes with NumPy: a backend as small as one can be."""
