/* Streams, events and the capture protocol of the simulated runtime.
 *
 * Eager, the default: whoever computes does so when it is called, and every stream is always idle.
 * Lazy (sim_set_lazy, or SIM_NPU_LAZY=1): what is put on a stream, by sim_enqueue, waits there until somebody waits for
 * it: a synchronisation, or a wait of another stream for an event behind it.  So work is always as late as the program
 * allows, and where a wait is missing the numbers are wrong, each time.  One thread at a time drains.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define OK 0
#define E_PARAM 100000
#define E_STATE 107027
#define E_KERNEL 507015
#define E_TIMEOUT 507046
#define T cann_trace

extern void cann_trace(const char *, ...);

enum kind { CALL, RECORD, WAIT };
typedef struct event { struct event *next; void *cell; double t; long recorded, done, taken; struct stream *on; int refs, dead, cap; } event;
typedef struct task { struct task *next; enum kind kind; long id; event *e; } task;
typedef struct model { int id, ops, groups, waits; event *waited[64]; } model;
typedef struct stream { struct stream *next; int id, group, busy, open; model *cap; task *first, **last; } stream;

static pthread_mutex_t g_lists = PTHREAD_MUTEX_INITIALIZER, g_draining;
static stream *g_streams, g_null;
static int g_next = 1, g_lazy;
static int (*g_run)(long);
static event *g_cells;

__attribute__((constructor)) static void boot(void) {
    pthread_mutexattr_t a; pthread_mutexattr_init(&a); pthread_mutexattr_settype(&a, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&g_draining, &a);
    g_null.last = &g_null.first; g_streams = &g_null;
    const char *v = getenv("SIM_NPU_LAZY"); g_lazy = v && *v == '1';
}
static stream *at(void *s) { return s ? s : &g_null; }

/* ---- queues ---- */
static void release(event *e) { if (--e->refs == 0 && e->dead) free(e); }
static void push(void *where, enum kind kind, long id, event *e) {
    stream *s = at(where);
    task *t = calloc(1, sizeof *t); t->kind = kind; t->id = id; t->e = e;
    pthread_mutex_lock(&g_lists); if (e) e->refs++; *s->last = t; s->last = &t->next; pthread_mutex_unlock(&g_lists);
}
static task *pop(stream *s) {
    pthread_mutex_lock(&g_lists);
    task *t = s->first;
    if (t) { s->first = t->next; if (!s->first) s->last = &s->first; }
    pthread_mutex_unlock(&g_lists); return t;
}
static double now(void) { struct timespec s; clock_gettime(CLOCK_MONOTONIC, &s); return s.tv_sec * 1e3 + s.tv_nsec / 1e6; }
/* A graph waits for an external event and resets it: each replay needs a record of its own, behind the replay before. */
static int take(event *e) {
    if (e->recorded > e->taken) { e->taken++; return OK; }
    fprintf(stderr, "simulated CANN: a replay waits for an external event that nobody has recorded since the last one: it would hang\n");
    return E_TIMEOUT;
}
static int note(event *e, long ticket) {
    int rc = OK;
    if (e->cell && e->done > e->taken) {
        fprintf(stderr, "simulated CANN: an external event is recorded again before the replay that waits for it: one would hang\n");
        rc = E_TIMEOUT;
    }
    e->t = now(); if (e->done < ticket) e->done = ticket;
    return rc;
}
/* Until the queue is empty, or an event has seen its record number `ticket`; or, with `early`, a wait would wait.  A stream
 * that is being drained is where it is. */
static int drain(stream *s, event *until, long ticket, int early) {
    int rc = OK; task *t;
    if (s->busy) return OK;
    s->busy = 1;
    while (!(until && until->done >= ticket)) {
        if (early && s->first && s->first->kind == WAIT && s->first->e->done < s->first->id) break;
        if (!(t = pop(s))) break;
        if (t->kind == CALL && g_run && g_run(t->id)) rc = E_KERNEL;
        if (t->kind == RECORD) rc |= note(t->e, t->id);
        if (t->kind == WAIT) {                       /* id 0: of an event outside a graph: the next record of it */
            long ticket_of = t->id;
            if (!t->id) { rc |= take(t->e); ticket_of = t->e->taken; }
            if (t->e->done < ticket_of && t->e->on) rc |= drain(t->e->on, t->e, ticket_of, 0);
        }
        pthread_mutex_lock(&g_lists); if (t->e) release(t->e); pthread_mutex_unlock(&g_lists);
        free(t);
    }
    s->busy = 0; return rc;
}
/* What a stream can do without a wait, now: the others may still be anywhere. */
int sim_advance(void *where) {
    if (!g_lazy) return OK;
    pthread_mutex_lock(&g_draining); int rc = drain(at(where), 0, 0, 1); pthread_mutex_unlock(&g_draining); return rc;
}
int sim_drain(void *where) {
    if (!g_lazy) return OK;
    pthread_mutex_lock(&g_draining); int rc = drain(at(where), 0, 0, 0); pthread_mutex_unlock(&g_draining); return rc;
}
static int drain_all(void) {
    int rc = OK;
    if (!g_lazy) return OK;
    pthread_mutex_lock(&g_draining);
    for (stream *s = g_streams; s; s = s->next) rc |= drain(s, 0, 0, 0);
    pthread_mutex_unlock(&g_draining); return rc;
}
static int drain_event(event *e) {
    if (!g_lazy || !e->on) return OK;
    pthread_mutex_lock(&g_draining); int rc = drain(e->on, e, e->recorded, 0); pthread_mutex_unlock(&g_draining); return rc;
}
void sim_set_lazy(int lazy) { if (!lazy) drain_all(); g_lazy = lazy; }
int sim_is_lazy(void) { return g_lazy; }
void sim_set_runner(int (*run)(long)) { g_run = run; }
void sim_enqueue(void *where, long id) { push(where, CALL, id, 0); }

/* ---- streams ---- */
int aclrtSynchronizeDevice(void) { return drain_all(); }
int aclrtSynchronizeDeviceWithTimeout(int32_t t) { (void)t; return drain_all(); }
int aclrtCreateStreamWithConfig(void **s, uint32_t p, uint32_t f) {
    (void)p; (void)f;
    stream *x = calloc(1, sizeof *x); x->id = g_next++; x->last = &x->first;
    pthread_mutex_lock(&g_lists); x->next = g_streams->next; g_streams->next = x; pthread_mutex_unlock(&g_lists);
    *s = x; return OK;
}
int aclrtCreateStream(void **s) { return aclrtCreateStreamWithConfig(s, 0, 0); }
int aclrtDestroyStream(void *s) {
    sim_drain(s);
    pthread_mutex_lock(&g_lists);
    for (stream *x = g_streams; x; x = x->next) if (x->next == s) { x->next = x->next->next; break; }
    pthread_mutex_unlock(&g_lists);
    return OK;                                       /* the memory stays: events may name it */
}
int aclrtDestroyStreamForce(void *s) { return aclrtDestroyStream(s); }
int aclrtSynchronizeStream(void *s) { return sim_drain(s); }
int aclrtSynchronizeStreamWithTimeout(void *s, int32_t t) { (void)t; return sim_drain(s); }
int aclrtStreamQuery(void *s, int *st) { *st = at(s)->first ? 1 : 0; return OK; }
int aclrtStreamGetId(void *s, int32_t *id) { *id = at(s)->id; return OK; }
int aclrtSetStreamFailureMode(void *s, uint64_t m) { (void)s; (void)m; return OK; }
int aclrtSetStreamAttribute(void *s, int a, void *v) { (void)s; (void)a; (void)v; return OK; }

/* ---- events ---- */
int aclrtCreateEventExWithFlag(void **e, uint32_t f) { (void)f; *e = calloc(1, sizeof(event)); return OK; }
int aclrtCreateEventWithFlag(void **e, uint32_t f) { return aclrtCreateEventExWithFlag(e, f); }
int aclrtDestroyEvent(void *p) {
    event *e = p;
    pthread_mutex_lock(&g_lists); e->dead = 1; e->refs++; release(e); pthread_mutex_unlock(&g_lists); return OK;
}
int aclrtRecordEvent(void *p, void *s) {
    event *e = p; e->on = at(s); e->recorded++;
    e->cap = at(s)->cap ? at(s)->cap->id : 0;
    if (g_lazy && !at(s)->cap) push(s, RECORD, e->recorded, e); else { e->t = now(); e->done = e->recorded; }
    return OK;
}
/* A stream that waits for an event of a captured one is captured too, until that one waits for it: a capture that ends before
 * is refused. */
static void fork_or_join(stream *s, event *e) {
    if (!e->cap || !e->on || !e->on->cap || e->on->cap->id != e->cap) return;
    if (!s->cap) { s->cap = e->on->cap; s->open = 1; } else if (s->cap == e->on->cap) e->on->open = 0;
}
int aclrtResetEvent(void *e, void *s) { (void)e; (void)s; return OK; }
int aclrtStreamWaitEvent(void *s, void *p) {
    event *e = p; if (!e->cell) fork_or_join(at(s), e);
    model *m = at(s)->cap;
    if (m) { if (e->cell && m->waits < 64) { pthread_mutex_lock(&g_lists); e->refs++; pthread_mutex_unlock(&g_lists); m->waited[m->waits++] = e; } }
    else if (g_lazy && e->recorded) push(s, WAIT, e->recorded, e);
    return OK;
}
/* External events are cells of memory: 1 is recorded, 0 reset, and a wait is for 1. */
static event *cell(void *p) {
    event *e;
    pthread_mutex_lock(&g_lists);
    for (e = g_cells; e && e->cell != p; e = e->next) {}
    if (!e) { e = calloc(1, sizeof *e); e->cell = p; e->next = g_cells; g_cells = e; }
    pthread_mutex_unlock(&g_lists); return e;
}
int aclrtValueWrite(void *p, uint64_t value, uint32_t flag, void *s) { (void)flag; return value ? aclrtRecordEvent(cell(p), s) : OK; }
int aclrtValueWait(void *p, uint64_t value, uint32_t flag, void *s) { (void)value; (void)flag; return aclrtStreamWaitEvent(s, cell(p)); }
int aclrtSynchronizeEvent(void *e) { return drain_event(e); }
/* A query moves things on, so that who polls gets there, if nobody else drains. */
int aclrtQueryEventStatus(void *p, int *s) {
    event *e = p; *s = e->done >= e->recorded;
    if (!*s && pthread_mutex_trylock(&g_draining) == 0) { drain(e->on, e, e->done + 1, 0); pthread_mutex_unlock(&g_draining); }
    return OK;
}
int aclrtQueryEventWaitStatus(void *e, int *s) { (void)e; *s = 0; return OK; }
int aclrtEventElapsedTime(float *ms, void *a, void *b) { *ms = (float)(((event *)b)->t - ((event *)a)->t); return OK; }
int aclrtEventGetTimestamp(void *e, uint64_t *t) { *t = (uint64_t)(((event *)e)->t * 1e3); return OK; }
int aclrtSubscribeReport(uint64_t t, void *s) { (void)t; (void)s; return OK; }
int aclrtUnSubscribeReport(uint64_t t, void *s) { (void)t; (void)s; return OK; }
int aclrtProcessReport(int32_t ms) { usleep(1000 * (ms > 0 && ms < 50 ? ms : 50)); return OK; }
int aclrtLaunchHostFunc(void *s, void (*fn)(void *), void *a) { sim_drain(s); fn(a); return OK; }
int aclrtLaunchCallback(void (*fn)(void *), void *a, int b, void *s) { (void)b; sim_drain(s); fn(a); return OK; }

/* ---- graph capture: the protocol only; whoever records and replays the operators calls sim_enqueue ---- */
int aclmdlRICaptureBegin(void *s, int mode) {
    stream *x = s; if (!x || x->cap) return E_STATE;
    x->cap = calloc(1, sizeof(model)); x->cap->id = g_next++; T("capture_begin stream=%d mode=%d", x->id, mode); return OK;
}
int aclmdlRICaptureEnd(void *s, void **m) {
    stream *x = s; if (!x || !x->cap || x->group || x->open) return E_STATE;
    T("capture_end model=%d ops=%d groups=%d", x->cap->id, x->cap->ops, x->cap->groups); *m = x->cap;
    int open = 0;
    for (stream *each = g_streams; each; each = each->next) if (each->cap == *m) { open |= each->open; each->cap = 0; each->open = 0; }
    if (open) fprintf(stderr, "simulated CANN: a capture ends before a stream that it forked is waited for\n");
    return open ? E_STATE : OK;
}
int aclmdlRICaptureGetInfo(void *s, int *st, void **m) { stream *x = s; *st = x && x->cap ? 1 : 0; if (m) *m = x ? x->cap : 0; return OK; }
int aclmdlRICaptureThreadExchangeMode(int *m) { (void)m; return OK; }
int aclmdlRICaptureTaskGrpBegin(void *s) { stream *x = s; if (!x || !x->cap || x->group) return E_STATE; x->group = 1; T("group_begin"); return OK; }
int aclmdlRICaptureTaskGrpEnd(void *s, void **h) {
    stream *x = s; if (!x || !x->cap || !x->group) return E_STATE;
    x->group = 0; x->cap->groups++; *h = (void *)(uintptr_t)(g_next++); T("group_end handle=%p", *h); return OK;
}
int aclmdlRICaptureTaskUpdateBegin(void *s, void *h) { stream *x = s; if (!h || x->cap) return E_STATE; T("update_begin handle=%p", h); return OK; }
int aclmdlRICaptureTaskUpdateEnd(void *s) { (void)s; T("update_end"); return OK; }
/* What it captured as waits for events from outside, it waits for before anything else. */
int aclmdlRIExecuteAsync(void *p, void *s) {
    model *m = p; if (!m) return E_PARAM;
    T("replay model=%d", m->id);
    int rc = OK;
    for (int i = 0; i < m->waits; i++) if (g_lazy) push(s, WAIT, 0, m->waited[i]); else rc |= take(m->waited[i]);
    return rc;
}
int aclmdlRIDestroy(void *p) {
    model *m = p;
    pthread_mutex_lock(&g_lists); for (int i = 0; i < m->waits; i++) release(m->waited[i]); pthread_mutex_unlock(&g_lists);
    free(m); return OK;
}
int aclmdlRIGetId(void *m, uint32_t *id) { *id = ((model *)m)->id; return OK; }
int aclmdlRIDebugPrint(void *m) { (void)m; return OK; }
int aclmdlRIDebugJsonPrint(void *m, const char *p, uint32_t f) { (void)m; (void)p; (void)f; return OK; }
