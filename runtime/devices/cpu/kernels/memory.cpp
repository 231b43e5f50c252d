// What the C++ library has beside its headers and the kernels use: memory, and the end of a broken invariant. With it
// the kernels link to the C library alone, whichever compiler made them.
#include <stdlib.h>

#include <cstddef>
#include <new>

namespace {

// Raises nothing: the kernels are compiled without exceptions. What may be large is allocated where a failure is told.
void* allocate(size_t bytes, size_t alignment) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment < sizeof(void*) ? sizeof(void*) : alignment, bytes) != 0) abort();
    return memory;
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes, alignof(max_align_t)); }
void* operator new[](size_t bytes) { return allocate(bytes, alignof(max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) { return allocate(bytes, (size_t)alignment); }
void* operator new[](size_t bytes, std::align_val_t alignment) { return allocate(bytes, (size_t)alignment); }
void operator delete(void* memory) noexcept { free(memory); }
void operator delete[](void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
void operator delete[](void* memory, size_t) noexcept { free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { free(memory); }

extern "C" void __cxa_pure_virtual() { abort(); }

#if defined(_LIBCPP_VERSION)  // Clang's: what its checks of bounds call
extern "C" [[noreturn]] void fail_check(const char*, ...) __asm__("_ZNSt3__122__libcpp_verbose_abortEPKcz");
extern "C" [[noreturn]] void fail_check(const char*, ...) { abort(); }
#endif
