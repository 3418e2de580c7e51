"""The common parts of CPM-Live's two models, CPM-Bee and CPM-Ant."""
