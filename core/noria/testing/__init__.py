"""What backend authors test with: the conformance kit (`noria.testing.suite`) and a checker of hazards.

Importing this package imports no pytest; importing `noria.testing.suite` does.
"""
