"""Sequence parallel attention in models of other packages: a module for each, which needs that
package.
"""
