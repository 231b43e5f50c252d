// Instructions that the processor refuses, or the operating system for it: SIGILL ends a process that does not expect it.
#pragma once

#include <setjmp.h>
#include <signal.h>

namespace refused {

inline sigjmp_buf before;

inline void leave(int) { siglongjmp(before, 1); }

// Whether `act` runs to its end on this thread. What it held when an instruction was refused is lost. One thread of the
// process at a time.
template <class Act> inline bool runs(Act act) {
    struct sigaction own = {}, previous;
    own.sa_handler = leave;
    sigaction(SIGILL, &own, &previous);
    volatile bool is_done = false;
    if (sigsetjmp(before, 1) == 0) {
        act();
        is_done = true;
    }
    sigaction(SIGILL, &previous, nullptr);
    return is_done;
}

}  // namespace refused
