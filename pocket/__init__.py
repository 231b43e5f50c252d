"""Training code of pocket, the small demonstration model that `runtime` ships.

Nothing here is imported by the server: the server needs only the files that this
package writes into `runtime/pocket/`.
"""
