"""What makes stacked clients fast on a GPU: convolutions and recurrences of many models at once, steps recorded as CUDA graphs.

On a CPU only the convolutions and recurrences run, by plain tensor operations, where somebody asks for `kernel="stacked"`.
"""
