// Device side of symmem: signals, barriers and pointers for kernels that run on all ranks of a group.
//
// Self-contained: no other header is needed, and NVRTC compiles it as it is (C++17, compute_80 or later).
// Blocks are one-dimensional. No call traps and no call waits for ever unless its deadline is 0: a call that cannot
// finish notes why in the mailbox, from where the host takes it, and returns false; the kernel should then return.
#pragma once

typedef unsigned int symmem_u32;
typedef unsigned long long symmem_u64;

#define SYMMEM_MAX_RANKS 72
#define SYMMEM_MAX_BLOCKS 256
#define SYMMEM_SLOT_BLOCKS 64
#define SYMMEM_SLOT_BYTES 4096
#define SYMMEM_DRAWN_AT 64

#define SYMMEM_SCOPE_SYSTEM 0
#define SYMMEM_SCOPE_DEVICE 1 // all ranks on one device

// Why a call failed: SymmemMailbox::kind.
#define SYMMEM_TIMEOUT 1
#define SYMMEM_POISONED 2
#define SYMMEM_OTHER_CALL 3
#define SYMMEM_TOLD 4
#define SYMMEM_DOES_NOT_FIT 5
#define SYMMEM_LEFT 6

// Pinned host memory, one for each rank and group. The first failure is kept.
//
// | state | means | next |
// |---|---|---|
// | 0 | empty | 1 by the device that failed |
// | 1 | being written | 2 by the same thread |
// | 2 | written | 0 by the host |
struct SymmemMailbox {
    symmem_u32 poison; // not zero: lost rank + 1, from the host; waits end
    symmem_u32 state;
    symmem_u32 kind;
    symmem_u32 op;      // SymmemGroup::op or SymmemHandle::op
    symmem_u32 channel; // block, or channel of the allocation's pad
    symmem_u32 rank;    // for whom it waited, or who told, or whose rows
    // Digests of calls; or the limit in nanoseconds, the lower half first; or, in `theirs`, for whom the one waited that told
    // this, and one.
    symmem_u32 ours, theirs;
    symmem_u32 left[4]; // a bit for each rank that has left the job in order, from the host
};

// A group's own pads, on which blocks of built-in kernels synchronise. Passed by value.
//
// | bytes of a pad | what | written by |
// |---|---|---|
// | 0 | u32: not zero once the group has failed: failing rank + 1, and above the lowest byte for whom it waited, + 1 | any rank |
// | 64 | u32: pieces of work that blocks have drawn, zero between kernels | this rank |
// | 128 | u32[256]: epoch of each block | this rank |
// | 4096 | u64[256][size]: epoch, and the call in the upper half, by block and source | block of the source |
// | next multiple of 4096 | slots[2][64][size][4096]: data with flags, by parity of the epoch, block, source | likewise |
struct SymmemGroup {
    symmem_u32 rank, size;
    symmem_u32 scope;
    symmem_u32 op;
    symmem_u32 call; // digest; blocks that synchronise must have the same
    symmem_u32 reserved;
    symmem_u64 timeout; // nanoseconds, 0: for ever
    SymmemMailbox *mailbox;
    void *pads[SYMMEM_MAX_RANKS];
};

// An allocation as its users see it: memory and signal pads of all ranks, as this rank addresses them. Passed by value.
//
// Pads have the layout of PyTorch's: word `size * channel + source`, zero at rest, 1 while a signal lies there.
struct SymmemHandle {
    symmem_u32 rank, size;
    symmem_u32 scope;
    symmem_u32 channels;
    symmem_u32 op;
    symmem_u32 reserved;
    symmem_u64 timeout;
    SymmemMailbox *mailbox;
    void *buffers[SYMMEM_MAX_RANKS];
    void *pads[SYMMEM_MAX_RANKS];
    void *multicast; // or null
    void *group_pads[SYMMEM_MAX_RANKS]; // SymmemGroup::pads: where all ranks are told of a failure
};

// Some address for each rank. Passed by value.
struct SymmemPointers {
    void *at[SYMMEM_MAX_RANKS];
};

#ifdef __CUDACC_RTC__
#define SYMMEM_OFFSET(type, field) ((symmem_u64)__INTADDR__(&((type *)0)->field)) // NVRTC knows no other
#else
#define SYMMEM_OFFSET(type, field) __builtin_offsetof(type, field)
#endif
#define SYMMEM_AT(type, field, bytes) static_assert(SYMMEM_OFFSET(type, field) == bytes, "layout of " #type)
static_assert(sizeof(SymmemMailbox) == 48, "layout");
SYMMEM_AT(SymmemMailbox, state, 4);
SYMMEM_AT(SymmemMailbox, rank, 20);
SYMMEM_AT(SymmemMailbox, theirs, 28);
SYMMEM_AT(SymmemMailbox, left, 32);
static_assert(sizeof(SymmemGroup) == 616, "layout");
SYMMEM_AT(SymmemGroup, call, 16);
SYMMEM_AT(SymmemGroup, timeout, 24);
SYMMEM_AT(SymmemGroup, mailbox, 32);
SYMMEM_AT(SymmemGroup, pads, 40);
static_assert(sizeof(SymmemHandle) == 1776, "layout");
SYMMEM_AT(SymmemHandle, op, 16);
SYMMEM_AT(SymmemHandle, timeout, 24);
SYMMEM_AT(SymmemHandle, mailbox, 32);
SYMMEM_AT(SymmemHandle, buffers, 40);
SYMMEM_AT(SymmemHandle, pads, 616);
SYMMEM_AT(SymmemHandle, multicast, 1192);
SYMMEM_AT(SymmemHandle, group_pads, 1200);
static_assert(sizeof(SymmemPointers) == 576, "layout");
#undef SYMMEM_AT

// ---- words that ranks share -------------------------------------------------------------------------------------------

__device__ __forceinline__ symmem_u32 symmem_load_relaxed(const void *word) {
    symmem_u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void symmem_store_relaxed(void *word, symmem_u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// How the words by which blocks of different ranks synchronise order what is around them.
#define SYMMEM_NEVER 0  // not at all
#define SYMMEM_ACROSS 1 // where ranks are on different devices: on one, the beginnings and ends of kernels do
#define SYMMEM_ALWAYS 2

// Acquire, at device or system scope, as ORDER says.
template <int ORDER> __device__ __forceinline__ symmem_u64 symmem_load64(const void *word, symmem_u32 scope) {
    symmem_u64 value;
    if (ORDER == SYMMEM_NEVER || (ORDER == SYMMEM_ACROSS && scope == SYMMEM_SCOPE_DEVICE)) {
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    } else if (scope == SYMMEM_SCOPE_DEVICE) {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    } else {
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    }
    return value;
}

// Release, likewise.
template <int ORDER>
__device__ __forceinline__ void symmem_store64(void *word, symmem_u64 value, symmem_u32 scope) {
    if (ORDER == SYMMEM_NEVER || (ORDER == SYMMEM_ACROSS && scope == SYMMEM_SCOPE_DEVICE)) {
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
    } else if (scope == SYMMEM_SCOPE_DEVICE) {
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
    } else {
        asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
    }
}

__device__ __forceinline__ symmem_u32 symmem_swap_relaxed(void *word, symmem_u32 from, symmem_u32 to) {
    symmem_u32 old;
    asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old) : "l"(word), "r"(from), "r"(to) : "memory");
    return old;
}

__device__ __forceinline__ symmem_u32 symmem_swap_acquire(void *word, symmem_u32 from, symmem_u32 to,
                                                          symmem_u32 scope) {
    symmem_u32 old;
    if (scope == SYMMEM_SCOPE_DEVICE) {
        asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
                     : "=r"(old) : "l"(word), "r"(from), "r"(to) : "memory");
    } else {
        asm volatile("atom.acquire.sys.global.cas.b32 %0, [%1], %2, %3;"
                     : "=r"(old) : "l"(word), "r"(from), "r"(to) : "memory");
    }
    return old;
}

// Orders everything before it, of this thread and of those it has synchronised with, before what follows: at device or system scope.
__device__ __forceinline__ void symmem_fence(symmem_u32 scope) {
    if (scope == SYMMEM_SCOPE_DEVICE) {
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
    } else {
        asm volatile("fence.acq_rel.sys;" ::: "memory");
    }
}

// Nanoseconds, from the clock that deadlines are measured with. Orders nothing.
__device__ __forceinline__ symmem_u64 symmem_now() {
    symmem_u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Acquire: what earlier kernels of the stream wrote is visible, also where this one was launched before they had ended.
__device__ __forceinline__ void symmem_after_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- waiting ----------------------------------------------------------------------------------------------------------

// What happens only on failure is not inlined: it would take registers from what happens always.
#define SYMMEM_COLD static __device__ __noinline__

// Release: the host that reads state 2 sees all fields, and peers what this thread told them. Writes a failure into the mailbox
// unless one lies there.
SYMMEM_COLD void symmem_note(SymmemMailbox *mailbox, symmem_u32 kind, symmem_u32 op, symmem_u32 channel,
                             symmem_u32 rank, symmem_u32 ours, symmem_u32 theirs) {
    if (mailbox == nullptr || symmem_swap_relaxed(&mailbox->state, 0, 1) != 0) {
        return;
    }
    symmem_store_relaxed(&mailbox->kind, kind);
    symmem_store_relaxed(&mailbox->op, op);
    symmem_store_relaxed(&mailbox->channel, channel);
    symmem_store_relaxed(&mailbox->rank, rank);
    symmem_store_relaxed(&mailbox->ours, ours);
    symmem_store_relaxed(&mailbox->theirs, theirs);
    symmem_fence(SYMMEM_SCOPE_SYSTEM);
    symmem_store_relaxed(&mailbox->state, 2);
}

// Release: tells all ranks, this one included, whose later kernels return at once. A rank that sees what this rank writes
// afterwards finds the word as well. `word` is as the pad has it.
SYMMEM_COLD void symmem_tell(void *const *group_pads, symmem_u32 size, symmem_u32 word) {
#pragma unroll 1
    for (symmem_u32 peer = 0; peer < size; peer++) {
        symmem_store_relaxed(group_pads[peer], word);
    }
    symmem_fence(SYMMEM_SCOPE_SYSTEM);
}

// Orders nothing. The reason to give up waiting for `rank`, and above the lowest byte who told or left; or 0.
SYMMEM_COLD symmem_u32 symmem_consider(symmem_u64 since, symmem_u64 timeout, SymmemMailbox *mailbox,
                                       const void *broken, symmem_u32 rank) {
    symmem_u32 told_by;
    if ((told_by = symmem_load_relaxed(broken)) != 0) {
        return SYMMEM_TOLD | told_by << 8;
    }
    if (mailbox != nullptr && (told_by = symmem_load_relaxed(&mailbox->poison)) != 0) {
        return SYMMEM_POISONED | told_by << 8;
    }
    if (mailbox != nullptr && (symmem_load_relaxed(&mailbox->left[rank / 32]) >> rank % 32 & 1) != 0) {
        return SYMMEM_LEFT | (rank + 1) << 8;
    }
    return timeout != 0 && symmem_now() - since >= timeout ? SYMMEM_TIMEOUT : 0;
}

// One wait. The clock starts after the first 16384 looks: until then a look costs a load and an addition.
struct SymmemPatience {
    symmem_u32 looks = 0; // the highest bit: the rank that is waited for has left
    symmem_u64 since = 0;

    // Orders nothing. As `symmem_consider`, now and then. What a rank does before it leaves is there before its host says
    // so: the caller looks once more before it hears of that.
    __device__ __forceinline__ symmem_u32 spent(symmem_u64 timeout, SymmemMailbox *mailbox, const void *broken,
                                                symmem_u32 rank) {
        looks += 1;
        if (looks < (1u << 14) || (looks & 255) != 0) {
            return 0;
        }
        since = since == 0 ? symmem_now() : since;
        symmem_u32 why = symmem_consider(since, timeout, mailbox, broken, rank);
        if ((why & 255) == SYMMEM_LEFT && (int)looks >= 0) {
            looks |= 1u << 31;
            return 0;
        }
        return why;
    }
};

// ---- an allocation's signals ------------------------------------------------------------------------------------------

// Orders nothing. The memory of `rank` as this rank addresses it.
template <class T> __device__ __forceinline__ T *symmem_peer(const SymmemHandle &handle, symmem_u32 rank) {
    return static_cast<T *>(handle.buffers[rank]);
}

// Orders nothing. The address that reaches all ranks' memory at once by multimem instructions, or null.
template <class T> __device__ __forceinline__ T *symmem_multicast(const SymmemHandle &handle) {
    return static_cast<T *>(handle.multicast);
}

__device__ __forceinline__ symmem_u32 *symmem_signal(const SymmemHandle &handle, symmem_u32 at, symmem_u32 source,
                                                     symmem_u32 channel) {
    return static_cast<symmem_u32 *>(handle.pads[at]) + (symmem_u64)handle.size * channel + source;
}

// Which rank a failure is blamed on, by the result of `symmem_consider`: the one that told, is lost, has left, or was awaited.
__device__ __forceinline__ symmem_u32 symmem_blamed(symmem_u32 why, symmem_u32 waited_for) {
    symmem_u32 kind = why & 255;
    return kind == SYMMEM_TIMEOUT ? waited_for : (kind == SYMMEM_TOLD ? why >> 8 & 255 : why >> 8) - 1;
}

// What `rank` tells all others: itself, and on whom it blames the failure, if on one. What it was told it passes on, because
// the one that told has perhaps not reached all yet.
__device__ __forceinline__ symmem_u32 symmem_word(symmem_u32 rank, symmem_u32 kind, symmem_u32 blamed, symmem_u32 theirs) {
    bool blames = kind == SYMMEM_TIMEOUT || kind == SYMMEM_LEFT || kind == SYMMEM_OTHER_CALL;
    return kind == SYMMEM_TOLD ? (blamed + 1) | theirs << 8 : (rank + 1) | (blames ? (blamed + 1) << 8 : 0);
}

// Release. Tells all ranks what `symmem_consider` said, and then notes it, so that no host hears of it before its peers'
// kernels can. Returns false.
SYMMEM_COLD bool symmem_give_up(const SymmemHandle &handle, symmem_u32 why, symmem_u32 channel, symmem_u32 waited_for) {
    symmem_u32 kind = why & 255, rank = symmem_blamed(why, waited_for);
    symmem_u32 theirs = kind == SYMMEM_TOLD ? why >> 16 : (symmem_u32)(handle.timeout >> 32);
    symmem_tell(handle.group_pads, handle.size, symmem_word(handle.rank, kind, rank, theirs));
    symmem_note(handle.mailbox, kind, handle.op, channel, rank, (symmem_u32)handle.timeout, theirs);
    return false;
}

// Release: what the calling thread wrote or saw before is visible to the thread of rank `to` that takes the signal.
// By one thread. Waits while an earlier signal lies there. False: failed, and noted.
__device__ inline bool symmem_put_signal(const SymmemHandle &handle, symmem_u32 to, symmem_u32 channel) {
    symmem_u32 *word = symmem_signal(handle, to, handle.rank, channel);
    symmem_fence(handle.scope);
    SymmemPatience patience;
    while (symmem_swap_relaxed(word, 0, 1) != 0) {
        if (symmem_u32 why = patience.spent(handle.timeout, handle.mailbox, handle.group_pads[handle.rank], to)) {
            return symmem_give_up(handle, why, channel, to);
        }
    }
    return true;
}

// Acquire: what the thread of rank `from` wrote or saw before it put the signal is visible to the calling thread.
// By one thread. Takes the signal, waiting for it. False: failed, and noted.
__device__ inline bool symmem_wait_signal(const SymmemHandle &handle, symmem_u32 from, symmem_u32 channel) {
    symmem_u32 *word = symmem_signal(handle, handle.rank, from, channel);
    SymmemPatience patience;
    while (symmem_swap_acquire(word, 1, 0, handle.scope) != 1) {
        if (symmem_u32 why = patience.spent(handle.timeout, handle.mailbox, handle.group_pads[handle.rank], from)) {
            return symmem_give_up(handle, why, channel, from);
        }
    }
    return true;
}

// Release and acquire: what any thread of the calling blocks wrote before is visible to all of their threads after.
// By a whole block, on one channel of the allocation's pad, and by one block of every rank. False on all threads of the
// block: failed, and noted.
__device__ inline bool symmem_barrier(const SymmemHandle &handle, symmem_u32 channel) {
    bool good = true;
    __syncthreads();
    for (symmem_u32 peer = threadIdx.x; peer < handle.size; peer += blockDim.x) {
        good = good && (peer == handle.rank || symmem_put_signal(handle, peer, channel));
    }
    for (symmem_u32 peer = threadIdx.x; peer < handle.size; peer += blockDim.x) {
        good = good && (peer == handle.rank || symmem_wait_signal(handle, peer, channel));
    }
    return __syncthreads_and(good);
}

// ---- a group's blocks -------------------------------------------------------------------------------------------------

// What a block carries from one barrier to the next, the same in all its threads.
struct SymmemBlock {
    symmem_u32 epoch;
    symmem_u32 broken; // of the pad, when the kernel began
};

__device__ __forceinline__ char *symmem_own_pad(const SymmemGroup &group) {
    return static_cast<char *>(group.pads[group.rank]);
}

__device__ __forceinline__ symmem_u64 symmem_flag_at(const SymmemGroup &group, symmem_u32 source) {
    return 4096 + ((symmem_u64)blockIdx.x * group.size + source) * 8;
}

// Where block `blockIdx.x` of rank `source` puts its data at this epoch, in any rank's pad.
__device__ __forceinline__ symmem_u64 symmem_slot_at(const SymmemGroup &group, symmem_u32 epoch, symmem_u32 source) {
    symmem_u64 first = (4096 + (symmem_u64)SYMMEM_MAX_BLOCKS * group.size * 8 + 4095) / 4096 * 4096;
    symmem_u64 slot = ((symmem_u64)(epoch & 1) * SYMMEM_SLOT_BLOCKS + blockIdx.x) * group.size + source;
    return first + slot * SYMMEM_SLOT_BYTES;
}

// The epoch that so many barriers lead to. Epochs wrap past 0, which is what a pad holds that was never written, and go on
// alternating between odd and even.
__device__ __forceinline__ symmem_u32 symmem_epoch_after(symmem_u32 epoch, symmem_u32 barriers) {
    symmem_u32 after = epoch + barriers;
    return after < epoch ? after + 2 : after;
}

// By all threads of a block, before anything else of this section, with the number of times that it will synchronise with others if
// all goes well. Acquire of what earlier kernels of the stream wrote, also where this one was launched before they had
// ended: it touches no memory before that, the epoch included, which the kernel before it has written.
//
// Then the next kernel is let go at once: not before this one may begin, so that never more than two kernels of a stream are
// on the device.
__device__ __forceinline__ SymmemBlock symmem_begin(const SymmemGroup &group, symmem_u32 barriers) {
    symmem_after_earlier();
    char *pad = symmem_own_pad(group), *epoch = pad + 128 + 4 * blockIdx.x;
    SymmemBlock block = {symmem_load_relaxed(epoch), symmem_load_relaxed(pad)};
    __syncthreads(); // all have read it
    // By a thread of another warp than those that tell the peers, where there is one: this takes as long.
    if (threadIdx.x == blockDim.x - 1) {
#if __CUDA_ARCH__ >= 900
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
        symmem_store_relaxed(epoch, symmem_epoch_after(block.epoch, barriers));
    }
    return block;
}

// Release, as `symmem_give_up` of a handle. Tells all ranks and notes a failure. Returns false.
SYMMEM_COLD bool symmem_fail(const SymmemGroup &group, symmem_u32 why, symmem_u32 rank, symmem_u32 theirs) {
    symmem_tell(group.pads, group.size, symmem_word(group.rank, why, rank, theirs));
    symmem_u32 ours = why == SYMMEM_OTHER_CALL ? group.call : (symmem_u32)group.timeout;
    theirs = why == SYMMEM_TIMEOUT ? (symmem_u32)(group.timeout >> 32) : theirs;
    symmem_note(group.mailbox, why, group.op, blockIdx.x, rank, ours, theirs);
    return false;
}

// Likewise, with what `symmem_consider` said.
SYMMEM_COLD bool symmem_give_up(const SymmemGroup &group, symmem_u32 why, symmem_u32 waited_for) {
    return symmem_fail(group, why & 255, symmem_blamed(why, waited_for), why >> 16);
}

// Likewise by one thread, where the first word of the pad said so. True: it did not.
__device__ __forceinline__ bool symmem_untold(const SymmemGroup &group, symmem_u32 broken, bool by_this) {
    return broken == 0 || (by_this && symmem_give_up(group, SYMMEM_TOLD | broken << 8, 0));
}

// Release as ORDER says: tells block `blockIdx.x` of `peer` that this block has reached the epoch.
template <int ORDER>
__device__ __forceinline__ void symmem_arrive(const SymmemGroup &group, const SymmemBlock &block, symmem_u32 peer) {
    void *flag = static_cast<char *>(group.pads[peer]) + symmem_flag_at(group, group.rank);
    symmem_store64<ORDER>(flag, block.epoch | (symmem_u64)group.call << 32, group.scope);
}

// Acquire as ORDER says: waits until block `blockIdx.x` of `peer` has reached the epoch in the same call. False: failed,
// noted, told.
template <int ORDER>
__device__ inline bool symmem_await(const SymmemGroup &group, const SymmemBlock &block, symmem_u32 peer) {
    char *pad = symmem_own_pad(group);
    SymmemPatience patience;
    for (;;) {
        symmem_u64 flag = symmem_load64<ORDER>(pad + symmem_flag_at(group, peer), group.scope);
        symmem_u32 ahead = (symmem_u32)flag - block.epoch;
        symmem_u32 theirs = (symmem_u32)(flag >> 32);
        if (ahead == 0 && theirs != group.call) {
            return symmem_fail(group, SYMMEM_OTHER_CALL, peer, theirs);
        }
        if ((int)ahead >= 0) {
            return true;
        }
        if (symmem_u32 why = patience.spent(group.timeout, group.mailbox, pad, peer)) {
            return symmem_give_up(group, why, peer);
        }
    }
}

// After the block has read what peers' memory holds: what the first word of the pad says, which is not 0 once a rank has given
// up, and may have changed that memory. Acquire: what the block has read was there before.
__device__ __forceinline__ symmem_u32 symmem_broken(const SymmemGroup &group) {
    if (group.scope != SYMMEM_SCOPE_DEVICE) {
        symmem_fence(SYMMEM_SCOPE_SYSTEM);
    }
    return symmem_load_relaxed(symmem_own_pad(group));
}

// How blocks synchronise.
#define SYMMEM_RELEASE 1 // what they wrote in this kernel is for the others
#define SYMMEM_FIRST 2   // before anything that peers' blocks must not overtake
#define SYMMEM_LAST 4    // before the end of the kernel, which is an acquire for what follows it on the device

// Waits for block `blockIdx.x` of all ranks. By all threads of the block. Between devices it is release and acquire, always. On
// one device it is acquire unless it is the LAST, and release with RELEASE: docs/memory-model.md says why that is enough.
//
// With RELEASE, what any of these blocks wrote is visible to all of them. Without, only what earlier kernels on the
// ranks' streams wrote, whose end is a release; and nobody leaves before all have read what they were to read. False on
// all threads of the block: failed, noted, and all ranks told.
template <int HOW> __device__ inline bool symmem_sync_blocks(const SymmemGroup &group, SymmemBlock &block) {
    if (!(HOW & SYMMEM_FIRST)) {
        __syncthreads();
    }
    block.epoch = symmem_epoch_after(block.epoch, 1);
    bool good = symmem_untold(group, block.broken, threadIdx.x == 0);
    for (symmem_u32 peer = threadIdx.x; good && peer < group.size; peer += blockDim.x) {
        if (peer != group.rank) {
            symmem_arrive<(HOW & SYMMEM_RELEASE) ? SYMMEM_ALWAYS : SYMMEM_ACROSS>(group, block, peer);
        }
    }
    for (symmem_u32 peer = threadIdx.x; good && peer < group.size; peer += blockDim.x) {
        if (peer != group.rank) {
            // Asked for before the wait, so that both loads are under way together.
            symmem_u32 broken = (HOW & SYMMEM_LAST) && !(HOW & SYMMEM_FIRST) ? symmem_broken(group) : 0;
            good = symmem_await<(HOW & SYMMEM_LAST) ? SYMMEM_ACROSS : SYMMEM_ALWAYS>(group, block, peer) &&
                   symmem_untold(group, broken, true);
        }
    }
    return __syncthreads_and(good);
}
