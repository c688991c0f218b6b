"""Captured subgraphs as ops: fusible pieces of a model's graph that are none of the ops of `reference.py`.

`partition` cuts them out of a graph, `reference` writes each as a Python file with the `values` of its inputs, `spec`
makes a KernelSpec of such a file, `find` finds its places in any graph, `cppstarter` turns Inductor's code into its
first kernel, `choose` puts the worthwhile ones into the plan.
"""
