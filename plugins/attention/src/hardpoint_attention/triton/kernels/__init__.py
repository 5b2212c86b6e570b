"""The kernels themselves. Importing this package imports Triton, which nothing else here does before a layer is made.

Legend of all modules: T tokens of the step, R rows, H query heads, K KV heads, G = H / K, D head size of queries and
keys, V of values, S splits. Arguments in capitals are compile-time constants. A tensor travels as a tuple of its
pointer and its strides in elements, one per dimension, so that none needs to be contiguous.
"""
