"""Every bound and size, with its reason beside it."""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# Payloads and storages start on a page, so that the kernel can share or move whole pages.
PAGE_BYTES = 4096

# Large enough to release the GIL and amortise a call, small enough to stay in the second-level cache.
IO_CHUNK_BYTES = 1 * MIB

# An object up to this size is read, hashed and written as one piece of memory: a thousand ranks have a million of them.
SMALL_OBJECT_BYTES = 4 * MIB

# The kernel backs a larger write with larger folios, and finding free memory for those can cost five times the write.
WRITE_BYTES = 64 * KIB

# What goes past the kernel's cache goes in such pieces: long enough for a disk's full speed. Whole pages.
STREAM_BYTES = 8 * MIB

# So much may wait for the disk before it is told to begin: fsync then finds little left to do.
SYNC_AHEAD_BYTES = 8 * MIB

# Files that may wait for their fsync, open: thousands must not exhaust the descriptors. So many of them wait at once.
SYNCING_MAX = 64
SYNCS_AT_ONCE = 8

# One xxh3_64 per chunk of an object lets a reader of a range verify the range alone.
VERIFY_CHUNK_BYTES = 16 * MIB

# What is not a layer and larger than this (a tokenizer, a big tensor of client_state) is an object of its own,
# so that it is stored once however many steps carry it; what is smaller lies inside its rank's state blob.
# DeepSpeed's zero_to_fp32.py (38 KB, the same at every step) is above, a rank's RNG state (16 KB, ever new) below.
INLINE_BYTES_MAX = 32 * KIB

# A commit record or a version blob of this size is not ours: the largest real ones are below 1 MiB.
RECORD_BYTES_MAX = 64 * MIB
BLOB_BYTES_MAX = 256 * MIB

# The pickle inside a .pt file describes a tree; 70B on 1,000 ranks needs about 2 MiB and 200,000 opcodes,
# a mixture of 50,000 experts ten times that. Twice as much must do, because memory has to stay small:
# a byte of opcode can make an object of 64, and a list, dict, set or call one of 250.
PICKLE_BYTES_MAX = 64 * MIB
PICKLE_OPCODES_MAX = 5_000_000
PICKLE_OBJECTS_MAX = 1_000_000
PICKLE_DEPTH_MAX = 200

# A pickle may name one list many times; whoever writes the tree out writes it each time.
PICKLE_EXPANDED_BYTES_MAX = 256 * MIB

# The largest real integers are random seeds of 128 bits. Python itself writes no integer of more than 4300 digits.
PICKLE_INT_BYTES_MAX = 1 * KIB

# Module and name of a global; real ones stay below 100.
PICKLE_NAME_BYTES_MAX = 1000

# torch itself stops at 64 dimensions in most kernels.
TENSOR_DIMENSIONS_MAX = 64

# A view may repeat its elements (expand); beyond this it would only be there to fill a disk.
TENSOR_REPEATED_BYTES_MAX = 64 * MIB

# Entries of one zip archive: one per tensor, frozen and partitioned ones included; a mixture of experts has 50,000.
# Names are data/<number> under the file's stem. A directory of this size is parsed within 100 MiB of memory.
ZIP_ENTRIES_MAX = 250_000
ZIP_NAME_BYTES_MAX = 512
ZIP_DIRECTORY_BYTES_MAX = 64 * MIB

# safetensors itself refuses headers beyond 100 MB.
SAFETENSORS_HEADER_BYTES_MAX = 100_000_000

# Small files of a checkpoint that are kept byte for byte: more of them than this is a mistaken folder.
SOURCE_FILES_MAX = 100_000

# A step has 18 digits in references and 8 bytes in the index.
STEP_MAX = 10**18

# Names of runs and pins become path components, which most filesystems end at 255 bytes.
NAME_BYTES_MAX = 200

# A recipe of one entry for each of 1,000 layers has 150 KB; reading a larger file would only take seconds.
# LLMTailor's grammar is nine deep, ours three.
RECIPE_BYTES_MAX = 256 * KIB
RECIPE_DEPTH_MAX = 16

# Blocks of a model that `estimate` makes up: no real one comes near.
MODEL_BLOCKS_MAX = 2_000

# Of one tensor that Transformers cuts or joins otherwise on disk than in memory. Rows of a large model stay below it;
# a matrix that is turned over, element by element, does not.
RENAMED_RUNS_MAX = 1 << 18
# Building a model without its elements takes seconds; a config may claim any number of layers.
RENAMING_SECONDS_MAX = 300.0

# The address space of the index, not its size: the file is sparse and grows as it is used.
MANIFEST_MAP_BYTES = 1 * GIB
MANIFEST_MAP_BYTES_MAX = 256 * GIB

# How long a command waits for a lock before it says who holds it.
LOCK_DEADLINE_SECONDS = 60.0

# How long a load waits for what savers of its own process still write; gloo's groups wait for three times that.
LOAD_WAIT_SECONDS = 600.0

# How long after its last renewal a lease on a network filesystem runs out: longer than a busy server takes to answer,
# shorter than the wait for a lock, so that a dead holder's lease runs out before a waiter gives up.
LEASE_SECONDS = 30.0
LEASE_RENEWED_SECONDS = 5.0

# How long what must be there is looked for again on a network filesystem, whose clients keep for a while what they have
# seen, and what they have not. After a search in vain nothing is searched for again for so long: damage is not late.
LATE_SECONDS = 10.0
NOT_LATE_SECONDS = 60.0

# Threads that read, hash and write objects; more of them only fight for the disk.
WORKERS_MAX = 4

# The age at which an object that nothing names is collected; until then a writer may still name it.
# A writer refreshes the times of all that it names just before its record; between the two lie moments, not minutes.
# Listings of network filesystems may be a minute late.
GC_GRACE_SECONDS = 5 * 60.0
# A file in tmp/ may be written for hours before it is linked, a rank may wait for hours for the others.
GC_UNFINISHED_GRACE_SECONDS = 24 * 3600.0

# How long what was dropped, replaced or taken out of the way stays in the trash.
TRASH_SECONDS = 7 * 24 * 3600.0

# Requests to a remote at a time: enough to fill a link where each answer takes a tenth of a second.
REMOTE_REQUESTS_MAX = 16
# What is larger goes up in such parts, two at a time: with all requests under way that is 512 MiB at most.
REMOTE_PART_BYTES = 16 * MIB
# Where a server says nothing for so long, what it was asked for is asked again.
REMOTE_SILENCE_SECONDS = 120.0
# An upload is silent until it ends. All that may be under way, 256 MiB, goes up in this time at 1.2 Mbit/s; that the
# other host is gone the kernel finds out sooner.
REMOTE_UPLOAD_SECONDS = 1800.0
# Tries of a request, and the pause before the second; each further pause is twice as long, 15 s together.
REMOTE_TRIES = 6
REMOTE_PAUSE_SECONDS = 0.5
# A collection of a remote removes what it has seen unnamed for so long; a push writes again what is half as old.
REMOTE_GRACE_SECONDS = 24 * 3600.0
# It removes by a listing no older than this; a push beside it waits for twice as long, and looks what is there.
REMOTE_MOMENT_SECONDS = 10.0
# How often a push that follows a run looks for new commits.
FOLLOW_SECONDS = 5.0
# What mirrors of remotes may take together, unless LAYERSTORE_CACHE_SIZE says otherwise: a composite of 8B.
CACHE_BYTES = 100 * GIB
