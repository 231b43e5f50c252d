// An allocator for a whole process (LD_PRELOAD), in memory that another process can have at the same address: tensors
// and structures of Python that an emulated library is given pointers to. Memory of one size class is used again, and
// never returned. The process may not fork without exec, for then two would write to one arena.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CLASSES = 64 };

void* const arena_address = (void*)0x200000000000;  // far from where Linux puts anything by itself
const size_t arena_bytes = (size_t)32 << 30;        // of which a machine has only what is touched
int arena_descriptor = -1;

struct Header {  // before every block that is in use
    void* begin;
    uint32_t class;
};

struct Free {
    struct Free* next;
};

static struct Free* free_blocks[CLASSES];
static char* top;
static atomic_flag is_locked = ATOMIC_FLAG_INIT;

static void lock(void) {
    while (atomic_flag_test_and_set_explicit(&is_locked, memory_order_acquire)) usleep(0);
}

static void unlock(void) { atomic_flag_clear_explicit(&is_locked, memory_order_release); }

static void end_fork(void) {
    static const char words[] = "arena: a process whose memory is shared with an emulator cannot fork\n";
    ssize_t ignored = write(2, words, sizeof words - 1);
    (void)ignored;
    _exit(70);
}

static void open_arena(void) {
    arena_descriptor = memfd_create("arena", 0);
    if (arena_descriptor < 0 || ftruncate(arena_descriptor, (off_t)arena_bytes) != 0) _exit(71);
    int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void* memory = (void*)syscall(SYS_mmap, arena_address, arena_bytes, PROT_READ | PROT_WRITE, flags, arena_descriptor, 0);
    if (memory != arena_address) _exit(72);
    top = memory;
}

static void __attribute__((constructor)) refuse_forks(void) { pthread_atfork(NULL, NULL, end_fork); }

// Half the powers of two as well, so that a block is at most 1.5 times what was asked for.
static uint32_t class_of(size_t bytes, size_t* size) {
    uint32_t power = bytes <= 64 ? 6 : 64 - (uint32_t)__builtin_clzll(bytes - 1);
    size_t less = ((size_t)3 << power) / 4;
    int fits = bytes <= less;
    *size = fits ? less : (size_t)1 << power;
    return 2 * (power - 6) + !fits;
}

static struct Header* header_of(void* memory) { return (struct Header*)memory - 1; }

static int is_ours(void* memory) {
    return (char*)memory >= (char*)arena_address && (char*)memory < (char*)arena_address + arena_bytes;
}

static void* allocate(size_t bytes, size_t alignment) {
    if (alignment < 16) alignment = 16;
    size_t size;
    if (bytes > arena_bytes) return NULL;
    uint32_t class = class_of(bytes + alignment + sizeof(struct Header), &size);
    lock();
    if (!top) open_arena();
    char* begin = (char*)free_blocks[class];
    if (begin) {
        free_blocks[class] = free_blocks[class]->next;
    } else if (top + size <= (char*)arena_address + arena_bytes) {
        begin = top;
        top += size;
    }
    unlock();
    if (!begin) return NULL;
    uintptr_t memory = ((uintptr_t)begin + sizeof(struct Header) + alignment - 1) / alignment * alignment;
    *header_of((void*)memory) = (struct Header){begin, class};
    return (void*)memory;
}

size_t malloc_usable_size(void* memory) {
    if (!memory) return 0;
    struct Header* header = header_of(memory);
    size_t size = header->class % 2 ? (size_t)64 << (header->class / 2) : (size_t)48 << (header->class / 2);
    return (size_t)((char*)header->begin + size - (char*)memory);
}

void* malloc(size_t bytes) {
    void* memory = allocate(bytes, 16);
    if (!memory) errno = ENOMEM;
    return memory;
}

void free(void* memory) {
    if (!memory || !is_ours(memory)) return;
    struct Header header = *header_of(memory);
    lock();
    struct Free* block = header.begin;
    block->next = free_blocks[header.class];
    free_blocks[header.class] = block;
    unlock();
}

void* calloc(size_t count, size_t bytes) {
    size_t total;
    if (__builtin_mul_overflow(count, bytes, &total)) return errno = ENOMEM, NULL;
    void* memory = malloc(total);
    return memory ? memset(memory, 0, total) : NULL;
}

void* realloc(void* memory, size_t bytes) {
    if (!memory) return malloc(bytes);
    size_t there = malloc_usable_size(memory);
    if (bytes <= there) return memory;
    void* larger = malloc(bytes);
    if (!larger) return NULL;
    memcpy(larger, memory, there);
    free(memory);
    return larger;
}

int posix_memalign(void** memory, size_t alignment, size_t bytes) {
    *memory = allocate(bytes, alignment);
    return *memory ? 0 : ENOMEM;
}

void* aligned_alloc(size_t alignment, size_t bytes) { return allocate(bytes, alignment); }
void* memalign(size_t alignment, size_t bytes) { return allocate(bytes, alignment); }
void* valloc(size_t bytes) { return allocate(bytes, 4096); }

static int read_file(int file, char* to, size_t bytes, off_t offset) {
    for (ssize_t count; bytes > 0; to += count, bytes -= (size_t)count, offset += count) {
        count = pread(file, to, bytes, offset);
        if (count <= 0) return count == 0;
    }
    return 1;
}

void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
    int is_private = flags & MAP_PRIVATE, is_read = protection == PROT_READ;
    if (address || !(protection & PROT_READ) || (protection & PROT_EXEC) || !(is_private || is_read))
        return (void*)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
    char* memory = allocate((bytes + 4095) / 4096 * 4096, 4096);
    if (!memory) return errno = ENOMEM, MAP_FAILED;
    madvise(memory, (bytes + 4095) / 4096 * 4096, MADV_REMOVE);  // which makes zeros of it
    if (flags & MAP_ANONYMOUS || read_file(file, memory, bytes, offset)) return memory;
    free(memory);
    return MAP_FAILED;
}

void* mmap64(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
    return mmap(address, bytes, protection, flags, file, offset);
}

int munmap(void* memory, size_t bytes) {
    if (!is_ours(memory)) return (int)syscall(SYS_munmap, memory, bytes);
    free(memory);
    return 0;
}
