"""Data, training and generation of CPM-Live's models CPM-Bee and CPM-Ant, in their own formats."""
