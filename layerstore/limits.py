"""Every limit and size, with its reason."""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# Payloads and storages start on a page, so that the kernel can share or move whole pages.
PAGE_BYTES = 4096

# Large enough to be worth releasing the GIL and to amortize a call, small enough to stay in the L2 cache.
IO_CHUNK_BYTES = 1 * MIB

# What ingest reads, hashes and codes at once. Every step of coding takes the interpreter's lock once per chunk: with
# chunks half as large, threads wait for the lock; with chunks twice as large, nothing stays in the caches.
SOURCE_CHUNK_BYTES = 2 * MIB

# Objects up to this size are read, hashed and written as one piece of memory: a thousand ranks have a million of them.
SMALL_OBJECT_BYTES = 4 * MIB

# A tensor that no rank has cut is cut into slices of at most this size, because an object is made and read whole.
SLICED_BYTES = 1 * GIB

# For larger writes, the kernel uses larger folios; finding free memory for them can cost five times what writing does.
WRITE_BYTES = 64 * KIB

# The size of writes that bypass the page cache: whole pages, and enough for a disk's full speed.
STREAM_BYTES = 8 * MIB

# How much data may wait before the kernel is told to start writing it to disk, so that fsync has little left to do.
SYNC_AHEAD_BYTES = 8 * MIB

# How many open files may wait for their fsync, since thousands would exhaust the descriptors; and how many fsyncs run
# at once.
SYNCING_MAX = 64
SYNCS_AT_ONCE = 8

# One xxh3_64 per chunk of an object lets a reader of a range verify the range alone.
VERIFY_CHUNK_BYTES = 16 * MIB

# Anything larger than this outside of layers (a tokenizer, a big tensor of client_state) is a separate object, stored
# once however many steps have it; anything smaller is inside its rank's state blob. DeepSpeed's zero_to_fp32.py (38 KB,
# the same at every step) is above the limit, a rank's RNG state (16 KB, always different) is below it.
INLINE_BYTES_MAX = 32 * KIB

# A commit record or version blob larger than this is not ours: the largest real ones are below 1 MiB.
RECORD_BYTES_MAX = 64 * MIB
BLOB_BYTES_MAX = 256 * MIB

# Maps and lists in one record or blob: each takes as little as one byte of file, and at least 64 bytes of memory. A
# record of 10,000 layers and ranks has 40,000 of them; a rank's part with the experts' slices of such a model has
# 200,000. A version has two for each slice of each rank, and 2,048 ranks of a large mixture of experts have a million
# slices.
RECORD_CONTAINERS_MAX = 1_000_000
BLOB_CONTAINERS_MAX = 4_000_000

# A number in a record or blob is a size, a count, a step, a checksum or a time in nanoseconds; no real one is larger.
NUMBER_MAX = 2**63 - 1

# How much of an export's weights one file holds: small enough for every hub and filesystem.
SHARD_SIZE = "5GB"

# Our own JSON files hold a few names and URLs, and `pushed.json` 36 bytes for each commit and remote.
OWN_JSON_BYTES_MAX = 1 * MIB
PUSHED_BYTES_MAX = 64 * MIB

# Lists and objects of one JSON text: each takes two bytes of text and at least 64 bytes of memory. A Trainer's log has
# one for each entry, a safetensors header three for each tensor.
JSON_CONTAINERS_MAX = 1_000_000

# The pickle inside a .pt file describes a tree; 70B on 1,000 ranks needs about 2 MiB and 200,000 opcodes, a mixture of
# 50,000 experts ten times that. The limits allow about twice that and no more, because memory must stay small: one byte
# of opcode can make an object of 64 bytes, or of 250 bytes if it is a list, dict, set or call.
PICKLE_BYTES_MAX = 64 * MIB
PICKLE_OPCODES_MAX = 5_000_000
PICKLE_OBJECTS_MAX = 1_000_000
PICKLE_DEPTH_MAX = 200

# A pickle may refer to one list many times, and writing out the tree writes the list each time.
PICKLE_EXPANDED_BYTES_MAX = 256 * MIB

# A distributed checkpoint's ``.metadata`` has 50 opcodes for each chunk of each tensor. 70B with Adam on 512 ranks has
# a million chunks: reading those takes two minutes and 8 GB.
DCP_METADATA_BYTES_MAX = 256 * MIB
DCP_METADATA_OPCODES_MAX = 60_000_000
DCP_METADATA_OBJECTS_MAX = 10_000_000

# The largest real integers are random seeds of 128 bits. Python itself refuses to print more than 4300 digits.
PICKLE_INT_BYTES_MAX = 1 * KIB

# Module and name of a global; real ones stay below 100.
PICKLE_NAME_BYTES_MAX = 1000

# torch itself stops at 64 dimensions in most kernels.
TENSOR_DIMENSIONS_MAX = 64

# A view may repeat its elements (expand); beyond this, its only purpose would be to fill a disk.
TENSOR_REPEATED_BYTES_MAX = 64 * MIB

# Entries of one zip archive: one per tensor, including frozen and partitioned ones; a mixture of experts has 50,000.
# Names are data/<number> under the file's stem. Parsing a directory of this size takes at most 100 MiB of memory.
ZIP_ENTRIES_MAX = 250_000
ZIP_NAME_BYTES_MAX = 512
ZIP_DIRECTORY_BYTES_MAX = 64 * MIB

# safetensors itself refuses headers beyond 100 MB.
SAFETENSORS_HEADER_BYTES_MAX = 100_000_000

# Small files of a checkpoint that are kept byte for byte; a folder with more of them is the wrong folder.
SOURCE_FILES_MAX = 100_000

# A step has 18 digits in references and 8 bytes in the index.
STEP_MAX = 10**18

# Ranks that a composite is written for: more than any job has. Each rank has its own files.
RANKS_MAX = 100_000

# Names of runs and pins become path components, which most filesystems limit to 255 bytes.
NAME_BYTES_MAX = 200

# A recipe with one entry for each of 1,000 layers takes 150 KB; parsing larger files would take seconds for nothing.
# LLMTailor's grammar nests nine levels deep, ours three.
RECIPE_BYTES_MAX = 256 * KIB
RECIPE_DEPTH_MAX = 16

# Blocks of a model that `estimate` makes up; no real model comes near.
MODEL_BLOCKS_MAX = 2_000

# The most contiguous stretches that one tensor may be put together from: Transformers splits and joins tensors as it
# saves them, and DCP stores them in chunks. With one stretch per row, a large model stays below this; a transposed
# matrix, with one stretch per element, does not.
RENAMED_RUNS_MAX = 1 << 18
# Building a model without elements takes seconds, but a config may claim any number of layers.
RENAMING_SECONDS_MAX = 300.0

# The address space of the index, not its size: the file is sparse and grows with use.
INDEX_MAP_BYTES = 1 * GIB
INDEX_MAP_BYTES_MAX = 256 * GIB

# How long a command waits for a lock before it says who holds it.
LOCK_DEADLINE_SECONDS = 60.0

# How long a load waits for the pending saves of its own process; gloo's groups wait for three times that.
LOAD_WAIT_SECONDS = 600.0

# How long to keep looking for a file that must exist on a network filesystem, whose clients cache both hits and misses
# for a while; and how long to wait after a failed search before searching again, because a lost file never appears.
LATE_SECONDS = 10.0
NOT_LATE_SECONDS = 60.0

# Threads that read, hash and write objects; more would only compete for the disk.
WORKERS_MAX = 4

# The age at which an object that nothing refers to is collected; until then, a writer may still refer to it. A writer
# refreshes the times of everything that its record refers to just before it writes the record: moments pass in between,
# not minutes. Listings on network filesystems may be a minute late.
GC_GRACE_SECONDS = 5 * 60.0
# A file in tmp/ may be written for hours before it is linked, and a rank may wait hours for the others.
GC_UNFINISHED_GRACE_SECONDS = 24 * 3600.0

# How long dropped, replaced or damaged files stay in the trash.
TRASH_SECONDS = 7 * 24 * 3600.0

# Concurrent requests to a remote: enough to fill a link if each answer takes a tenth of a second.
REMOTE_REQUESTS_MAX = 16
# Larger objects are uploaded in parts of this size, one request a part and two parts of an object at a time. An upload
# holds up to three parts in memory. If all concurrent uploads could fill more than a quarter of the free memory, parts
# are smaller, but not below the least size. Parts have the least size until an upload has shown that the line is fast.
REMOTE_PART_BYTES = 64 * MIB
REMOTE_PART_BYTES_LEAST = 16 * MIB
# What a save may hold in memory for its uploads, or one object if that is larger.
REMOTE_FLIGHT_BYTES = 256 * MIB
# How long a server may be silent before the request is retried.
REMOTE_SILENCE_SECONDS = 120.0
# An upload is silent until it ends. This is long enough to upload everything that may be in flight, 256 MiB, at
# 1.2 Mbit/s; the kernel notices sooner if the other host is gone.
REMOTE_UPLOAD_SECONDS = 1800.0
# Tries of a request, and the pause before the second try; each further pause is twice as long, 15 s in total.
REMOTE_TRIES = 6
REMOTE_PAUSE_SECONDS = 0.5
# A collection of a remote removes objects of at least this age once every commit that needs them has been in the trash
# for this long; a push rewrites the objects that it needs once they are half this old.
REMOTE_GRACE_SECONDS = 24 * 3600.0
# A collection of a remote lists and removes objects within this time; a concurrent push waits twice as long, then
# checks that its objects still exist.
REMOTE_MOMENT_SECONDS = 10.0
# How often a push that follows a run checks for new commits.
FOLLOW_SECONDS = 5.0
# The total size of all mirrors of remotes, unless LAYERSTORE_CACHE_SIZE is set: one composite of an 8B model.
CACHE_BYTES = 100 * GIB
