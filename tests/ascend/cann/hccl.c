/* HCCL between processes of one machine, over POSIX shared memory, for tests without NPUs.
 * A communicator is one shared segment: a barrier, one slot for each rank, and a mailbox for
 * each pair.  Every call blocks until it is done (run with TASK_QUEUE_ENABLE=0).
 *   SIM_HCCL_SLOT_MB   bytes a rank can publish at once (default 16; pages are sparse)
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

extern void cann_trace(const char *, ...);
extern int sim_drain(void *stream);              /* what is before a collective on its stream is done before it */
#define OK 0
#define E_PARA 1
#define E_TIMEOUT 9
#define BOX (1 << 20)
typedef struct { atomic_int full; uint32_t n; char data[BOX]; } box;
typedef struct { atomic_int ready, left; pthread_barrier_t bar; uint64_t counts[64][64]; } head;
typedef struct comm { struct comm *next; uint32_t n, rank, buffer_mb; uint64_t used; size_t slot, bytes; head *h; char *slots; box *boxes; char name[64]; } comm;
static comm *g_comms;

static const size_t width[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1};
static size_t wide(int dt) { return dt >= 0 && dt < 18 ? width[dt] : 0; }
static float half(uint16_t h) { _Float16 f; memcpy(&f, &h, 2); return f; }
static uint16_t to_half(float v) { _Float16 f = v; uint16_t h; memcpy(&h, &f, 2); return h; }
static float bf(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
static uint16_t to_bf(float v) { uint32_t u; memcpy(&u, &v, 4); if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0; return (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
static double one(double a, double b, int op) { return op == 0 ? a + b : op == 1 ? a * b : op == 2 ? (a > b ? a : b) : (a < b ? a : b); }
static int64_t onei(int64_t a, int64_t b, int op) { return op == 0 ? a + b : op == 1 ? a * b : op == 2 ? (a > b ? a : b) : (a < b ? a : b); }
#define FLOATS(T, GET, PUT) for (size_t i = 0; i < n; i++) { double v = GET(((T *)src[0])[i]); for (uint32_t r = 1; r < k; r++) v = one(v, GET(((T *)src[r])[i]), op); ((T *)dst)[i] = PUT(v); } return OK;
#define INTS(T) for (size_t i = 0; i < n; i++) { int64_t v = ((T *)src[0])[i]; for (uint32_t r = 1; r < k; r++) v = onei(v, ((T *)src[r])[i], op); ((T *)dst)[i] = (T)v; } return OK;
static int fold(void *dst, char **src, uint32_t k, size_t n, int dt, int op) {
    switch (dt) {
    case 3: FLOATS(uint16_t, half, to_half) case 11: FLOATS(uint16_t, bf, to_bf)
    case 4: FLOATS(float, , ) case 10: FLOATS(double, , )
    case 0: INTS(int8_t) case 1: INTS(int16_t) case 2: INTS(int32_t) case 5: INTS(int64_t)
    case 6: INTS(uint64_t) case 7: INTS(uint8_t) case 8: INTS(uint16_t) case 9: INTS(uint32_t)
    }
    return E_PARA;
}
static void meet(comm *c) { pthread_barrier_wait(&c->h->bar); }
static char *slot(comm *c, uint32_t r) { return c->slots + r * c->slot; }

int HcclSetConfig(int k, int64_t v) { (void)k; (void)v; return OK; }
int HcclGetRootInfo(void *info) {
    struct timespec t; clock_gettime(CLOCK_REALTIME, &t);
    memset(info, 0, 4108); snprintf(info, 4108, "/simhccl-%d-%lx", getpid(), (unsigned long)(t.tv_sec * 1000000000ul + t.tv_nsec));
    return OK;
}
int HcclCommInitRootInfo(uint32_t n, const void *info, uint32_t rank, void **out) {
    const char *e = getenv("SIM_HCCL_SLOT_MB");
    if (n > 64 || rank >= n) return E_PARA;
    comm *c = calloc(1, sizeof *c);
    const char *mb = getenv("HCCL_BUFFSIZE"); c->buffer_mb = mb && *mb ? atoi(mb) : 200;
    c->n = n; c->rank = rank; c->slot = (size_t)(e && *e ? atol(e) : 16) << 20;
    snprintf(c->name, sizeof c->name, "%s", (const char *)info);
    size_t top = (sizeof(head) + 4095) & ~4095ul;
    c->bytes = top + n * c->slot + (size_t)n * n * sizeof(box);
    int fd = shm_open(c->name, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, c->bytes)) return E_PARA;
    char *m = mmap(0, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (m == MAP_FAILED) return E_PARA;
    c->h = (head *)m; c->slots = m + top; c->boxes = (box *)(m + top + n * c->slot);
    if (rank == 0) {
        pthread_barrierattr_t a; pthread_barrierattr_init(&a); pthread_barrierattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
        pthread_barrier_init(&c->h->bar, &a, n); atomic_store(&c->h->left, n); atomic_store(&c->h->ready, 1);
    }
    for (int i = 0; !atomic_load(&c->h->ready); i++) { if (i > 60000) return E_TIMEOUT; usleep(1000); }
    meet(c);
    if (rank == 0) shm_unlink(c->name);                    /* everyone has it mapped */
    cann_trace("hccl comm size=%u rank=%u", n, rank);
    c->next = g_comms; g_comms = c;
    *out = c; return OK;
}
/* HcclCommConfig: 24 bytes of version, then the megabytes of the buffer, all ones where they are not set. */
int HcclCommInitRootInfoConfig(uint32_t n, const void *i, uint32_t r, const void *cfg, void **c) {
    int rc = HcclCommInitRootInfo(n, i, r, c); uint32_t mb;
    if (rc || !cfg) return rc;
    memcpy(&mb, (const char *)cfg + 24, sizeof mb);
    if (mb != UINT32_MAX) (*(comm **)c)->buffer_mb = mb;
    return OK;
}
int HcclCommDestroy(void *p) {
    comm *c = p;
    for (comm **x = &g_comms; *x; x = &(*x)->next) if (*x == c) { *x = c->next; break; }
    munmap(c->h, c->bytes); free(c); return OK;
}
int HcclGetCommName(void *p, char *n) { snprintf(n, 128, "%s", ((comm *)p)->name); return OK; }
int HcclGetCommAsyncError(void *p, int *e) { (void)p; *e = 0; return OK; }
uint32_t HcclGetCommConfigCapability(void) { return 1; }    /* the first of its settings: sizes of buffers */
int HcclBarrier(void *p, void *s) { sim_drain(s); meet(p); return OK; }

int HcclAllReduce(void *src, void *dst, uint64_t n, int dt, int op, void *p, void *s) {
    comm *c = p; size_t w = wide(dt), step; int rc = OK; c->used++; sim_drain(s);
    if (!w) return E_PARA;
    cann_trace("HcclAllReduce n=%lu dtype=%d", (unsigned long)n, dt);
    for (uint64_t at = 0; at < n; at += step) {
        step = c->slot / w; if (step > n - at) step = n - at;
        memcpy(slot(c, c->rank), (char *)src + at * w, step * w); meet(c);
        char *from[64]; for (uint32_t r = 0; r < c->n; r++) from[r] = slot(c, r);
        rc |= fold((char *)dst + at * w, from, c->n, step, dt, op); meet(c);
    }
    return rc;
}
int HcclReduce(void *src, void *dst, uint64_t n, int dt, int op, uint32_t root, void *p, void *s) {
    comm *c = p; size_t w = wide(dt);
    void *to = c->rank == root ? dst : malloc(n * w + 1);
    int rc = HcclAllReduce(src, to, n, dt, op, p, s);
    if (to != dst) free(to);
    return rc;
}
int HcclAllGather(void *src, void *dst, uint64_t n, int dt, void *p, void *s) {
    comm *c = p; size_t w = wide(dt), step; c->used++; sim_drain(s);
    if (!w) return E_PARA;
    cann_trace("HcclAllGather n=%lu dtype=%d", (unsigned long)n, dt);
    for (uint64_t at = 0; at < n; at += step) {
        step = c->slot / w; if (step > n - at) step = n - at;
        memcpy(slot(c, c->rank), (char *)src + at * w, step * w); meet(c);
        for (uint32_t r = 0; r < c->n; r++) memcpy((char *)dst + (r * n + at) * w, slot(c, r), step * w);
        meet(c);
    }
    return OK;
}
int HcclReduceScatter(void *src, void *dst, uint64_t n, int dt, int op, void *p, void *s) {
    comm *c = p; size_t w = wide(dt), step; int rc = OK; c->used++; sim_drain(s);
    if (!w) return E_PARA;
    for (uint64_t at = 0; at < n; at += step) {
        step = c->slot / w / c->n; if (step > n - at) step = n - at;
        for (uint32_t r = 0; r < c->n; r++) memcpy(slot(c, c->rank) + r * step * w, (char *)src + (r * n + at) * w, step * w);
        meet(c);
        char *from[64]; for (uint32_t r = 0; r < c->n; r++) from[r] = slot(c, r) + c->rank * step * w;
        rc |= fold((char *)dst + at * w, from, c->n, step, dt, op); meet(c);
    }
    return rc;
}
int HcclBroadcast(void *buf, uint64_t n, int dt, uint32_t root, void *p, void *s) {
    comm *c = p; size_t all = n * wide(dt), step; c->used++; sim_drain(s);
    for (size_t at = 0; at < all; at += step) {
        step = c->slot < all - at ? c->slot : all - at;
        if (c->rank == root) memcpy(slot(c, root), (char *)buf + at, step);
        meet(c);
        if (c->rank != root) memcpy((char *)buf + at, slot(c, root), step);
        meet(c);
    }
    return OK;
}
int HcclScatter(void *src, void *dst, uint64_t n, int dt, uint32_t root, void *p, void *s) {
    comm *c = p; size_t b = n * wide(dt); sim_drain(s);
    if (b > c->slot) return E_PARA;
    if (c->rank == root) for (uint32_t r = 0; r < c->n; r++) memcpy(slot(c, r), (char *)src + r * b, b);
    meet(c); memcpy(dst, slot(c, c->rank), b); meet(c);
    return OK;
}
/* all-to-all: counts and displacements are in elements; a null displacement list means packed */
static int exchange(comm *c, const char *src, const uint64_t *sn, const uint64_t *sd, size_t sw, char *dst, const uint64_t *rn, const uint64_t *rd, size_t rw) {
    uint64_t off = 0, pos = 0; c->used++;
    for (uint32_t r = 0; r < c->n; r++) {
        size_t b = sn[r] * sw;
        if (off + b > c->slot) { fprintf(stderr, "simulated HCCL: all-to-all over SIM_HCCL_SLOT_MB\n"); abort(); }
        memcpy(slot(c, c->rank) + off, src + (sd ? sd[r] * sw : off), b);
        c->h->counts[c->rank][r] = b; off += b;
    }
    meet(c);
    int rc = OK;
    for (uint32_t r = 0; r < c->n; r++) {
        size_t at = 0; for (uint32_t j = 0; j < c->rank; j++) at += c->h->counts[r][j];
        size_t b = c->h->counts[r][c->rank];
        if (rn && b != rn[r] * rw) { rc = E_PARA; continue; }
        memcpy(dst + (rd ? rd[r] * rw : pos), slot(c, r) + at, b); pos += b;
    }
    meet(c);
    return rc;
}
int HcclAlltoAllV(const void *s, const void *sn, const void *sd, int st, const void *d, const void *rn, const void *rd, int rt, void *p, void *q) {
    sim_drain(q); return exchange(p, s, sn, sd, wide(st), (char *)d, rn, rd, wide(rt));
}
int HcclAlltoAllVC(const void *s, const void *matrix, int st, const void *d, int rt, void *p, void *q) {
    comm *c = p; (void)rt; sim_drain(q);
    return exchange(c, s, (const uint64_t *)matrix + (size_t)c->rank * c->n, 0, wide(st), (char *)d, 0, 0, wide(st));
}
int HcclAlltoAll(const void *s, uint64_t n, int st, const void *d, uint64_t m, int rt, void *p, void *q) {
    uint64_t a[64], b[64]; for (int i = 0; i < 64; i++) { a[i] = n; b[i] = m; }
    sim_drain(q); return exchange(p, s, a, 0, wide(st), (char *)d, b, 0, wide(rt));
}
int HcclSend(void *buf, uint64_t n, int dt, uint32_t to, void *p, void *s) {
    comm *c = p; box *b = &c->boxes[(size_t)c->rank * c->n + to]; size_t all = n * wide(dt), step; sim_drain(s);
    for (size_t at = 0; at < all; at += step) {
        step = BOX < all - at ? BOX : all - at;
        while (atomic_load(&b->full)) usleep(50);
        memcpy(b->data, (char *)buf + at, step); b->n = step; atomic_store(&b->full, 1);
    }
    return OK;
}
int HcclRecv(void *buf, uint64_t n, int dt, uint32_t from, void *p, void *s) {
    comm *c = p; box *b = &c->boxes[(size_t)from * c->n + c->rank]; size_t all = n * wide(dt), step; sim_drain(s);
    for (size_t at = 0; at < all; at += step) {
        while (!atomic_load(&b->full)) usleep(50);
        step = b->n; if (step > all - at) return E_PARA;
        memcpy((char *)buf + at, b->data, step); atomic_store(&b->full, 0);
    }
    return OK;
}
typedef struct { int kind; void *buf; uint64_t n; int dt; uint32_t peer; } item;
int HcclBatchSendRecv(item *it, uint32_t k, void *p, void *s) {           /* kind 0 sends; mailboxes hold one piece, so sends go first */
    sim_drain(s);
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < k; i++)
            if (it[i].kind == pass) {
                if (!pass && it[i].n * wide(it[i].dt) > BOX) return E_PARA;
                int rc = pass ? HcclRecv(it[i].buf, it[i].n, it[i].dt, it[i].peer, p, s) : HcclSend(it[i].buf, it[i].n, it[i].dt, it[i].peer, p, s);
                if (rc) return rc;
            }
    return OK;
}
/* For operators that are given a group by its name: every rank's n bytes, in rank order.  The size of the group, 0 without one. */
static comm *named(const char *name) { for (comm *c = g_comms; c; c = c->next) if (!strcmp(c->name, name)) return c; return 0; }
int sim_hccl_buffer_mb(const char *name) { comm *c = named(name); return c ? (int)c->buffer_mb : 0; }
int sim_hccl_size(const char *name) { comm *c = named(name); return c ? (int)c->n : 0; }
/* How many collectives others than those operators had in it. */
int sim_hccl_used(const char *name) { comm *c = named(name); return c ? (int)c->used : 0; }
int sim_hccl_gather(const char *name, const void *src, uint64_t n, void *dst) {
    comm *c = named(name);
    if (!c) return E_PARA;
    uint64_t used = c->used; int rc = HcclAllGather((void *)src, dst, n, 0, c, 0);
    c->used = used; return rc;
}
