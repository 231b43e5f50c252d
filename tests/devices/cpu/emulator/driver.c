// Runs the kernels of another architecture for a process of this one: an emulator runs this program, which calls the
// functions of a library as it is told on its standard input. Both have the caller's memory at the same addresses, so
// that pointers need no change.
//
//   driver LIBRARY DESCRIPTOR ADDRESS BYTES      the descriptor is of the shared memory, see arena.c
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INTEGERS = 16, FLOATS = 8 };

struct Call {
    char name[64];
    int64_t integers[INTEGERS];
    float floats[FLOATS];
};

// Integers and pointers in their registers and then on the stack, floats in theirs: what arm64's convention (AAPCS64)
// and that of x86-64 make of every function with as many of each or fewer.
typedef int64_t Function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, float, float, float,
                         float, float, float);

static int read_all(void* to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t count = read(0, (char*)to + done, bytes - done);
        if (count <= 0) return 0;
        done += (size_t)count;
    }
    return 1;
}

int main(int count, char** arguments) {
    if (count != 5) return 2;
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 3;
    void* address = (void*)strtoull(arguments[3], NULL, 0);
    size_t bytes = strtoull(arguments[4], NULL, 0);
    int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED;
    if (mmap(address, bytes, PROT_READ | PROT_WRITE, flags, atoi(arguments[2]), 0) != address)
        return perror("mmap"), 4;
    struct Call call;
    while (read_all(&call, sizeof call)) {
        Function* function = (Function*)dlsym(library, call.name);
        if (!function) return fprintf(stderr, "%s\n", dlerror()), 5;
        const int64_t* i = call.integers;
        const float* f = call.floats;
        int64_t result = function(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13],
                                  i[14], i[15], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]);
        if (write(1, &result, sizeof result) != sizeof result) return 6;
    }
    return 0;
}
