"""A checkpoint: names, layouts and tensors in files, saved under one mesh and read under any other with equal values.

    checkpoints/step-50/manifest.json         names, shapes, layouts, pieces, sizes, digests, step, the caller's meta
    checkpoints/step-50/rank-R.safetensors    the pieces rank R held: 1-D ranges of the unsharded, flattened tensors
    checkpoints/writer.lock                   which process writes here
    checkpoints/aside-1/step-60/              of a continuation that a run has left by going back to an earlier step

A piece is `[start, stop)` of a flattened tensor, so a reader needs no mesh: it asks for the flat ranges its own layout
gives it.  The pieces of a name must tile its tensor exactly once; a replicated tensor is saved by one of its holders.

Where ranks hold slices of another dimension than the first, such as the columns of a matrix, a slice is no range of the
row-major tensor.  Then the elements are counted slice by slice: `cut` = (dimension, borders of the slices) says so, a
slice is one range again, and a reader may ask in any cut for what was saved in another.

Publishing.  Every rank writes, syncs and describes its shard (`part-R.json`, by rename) in `step-50.TOKEN-K.tmp`, where
TOKEN is new in every run and K counts this run's saves of that step, so that no file of another run or attempt can be
taken up.  Rank 0 waits for all parts, checks them as a reader would, writes the manifest and renames the folder to
`step-50`.  A killed process leaves the old checkpoint or the new one.  A step saved again stands as `step-50.old`
between two renames; `find` knows that name.  Nothing older is pruned before the new folder has been read back.

Digests.  Pieces and headers carry CRC-32, which finds every single flipped bit, every burst of up to 32 bits and all
else but one case in 4e9; the manifest carries the BLAKE2b of its own bytes.  They find damage, not forgery.  Measured,
64 MiB, one core of a 2-core Xeon (model 167): zlib.crc32 1.9 GB/s, zlib.adler32 1.4, hashlib.sha256 0.9,
hashlib.blake2b 0.7; CRC-32 lets go of the interpreter lock meanwhile.

No pickle: the only decoder here is `json`, on files of limited size whose digest matched, strictly (no duplicate keys,
no NaN, limited depth).  File names in a manifest are `rank-N.safetensors` and nothing else; links are not followed.
"""

from interlace.checkpoint.lock import LOCK
from interlace.checkpoint.manifest import DTYPES, FORMAT, MANIFEST, PLAIN, STEP, Slices
from interlace.checkpoint.reader import Reader, configuration, find, newest
from interlace.checkpoint.writer import Piece, Writer

__all__ = [
    "DTYPES",
    "FORMAT",
    "LOCK",
    "MANIFEST",
    "PLAIN",
    "STEP",
    "Piece",
    "Reader",
    "Slices",
    "Writer",
    "configuration",
    "find",
    "newest",
]
