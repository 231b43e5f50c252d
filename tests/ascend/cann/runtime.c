/* A host-memory imitation of the small part of the Ascend runtime API that
 * torch_npu calls.  "Device" memory is ordinary host memory, copies are memcpy,
 * and operators do nothing (they are only traced).  Streams and events are in streams.c.
 * Prototypes follow the documented C ABI; no vendor header is needed.
 *
 *   SIM_NPU_COUNT   devices to report          (default 1)
 *   SIM_NPU_MEM_MB  memory per device          (default 2048)
 *   SIM_NPU_SOC     SoC name                   (default Ascend910B3)
 *   SIM_CANN_TRACE  file to append a trace to  (default: no trace)
 *   SIM_CANN_STRICT 1: an operator that reaches CANN fails, in place of doing nothing
 *   SIM_CANN_VERSION                           (default 9.1.0)
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define OK 0
#define E_PARAM 100000
#define E_ALLOC 207001
#define E_STATE 107027

static FILE *g_trace;
static __thread int t_dev = -1;
static size_t g_used;
static pthread_mutex_t g_mu = PTHREAD_MUTEX_INITIALIZER;

static long env_long(const char *k, long d) { const char *v = getenv(k); return v && *v ? atol(v) : d; }
static size_t mem_total(void) { return (size_t)env_long("SIM_NPU_MEM_MB", 2048) << 20; }

__attribute__((constructor)) static void boot(void) {
    const char *p = getenv("SIM_CANN_TRACE");
    if (p && *p) { g_trace = fopen(p, "a"); if (g_trace) setvbuf(g_trace, 0, _IOLBF, 0); }
}
void cann_trace(const char *fmt, ...) {
    if (!g_trace) return;
    va_list ap; va_start(ap, fmt); vfprintf(g_trace, fmt, ap); va_end(ap); fputc('\n', g_trace);
}
#define T cann_trace
int cann_operator(const char *op) {
    T("%s", op);
    if (!env_long("SIM_CANN_STRICT", 0)) return OK;
    fprintf(stderr, "simulated CANN: %s reached CANN: it ran outside the emulation\n", op);
    return 561000;
}

/* ---- process and devices ---- */
int aclInit(const char *cfg) { (void)cfg; return OK; }
int aclFinalize(void) { return OK; }
void aclAppLog(int l, const char *f, const char *file, uint32_t n, const char *fmt, ...) { (void)l; (void)f; (void)file; (void)n; (void)fmt; }
const char *aclGetRecentErrMsg(void) { return ""; }
const char *aclrtGetSocName(void) { const char *s = getenv("SIM_NPU_SOC"); return s && *s ? s : "Ascend910B3"; }
int aclrtGetDeviceCount(uint32_t *n) { *n = (uint32_t)env_long("SIM_NPU_COUNT", 1); return OK; }
int aclrtSetDevice(int32_t d) { if (d < 0 || d >= env_long("SIM_NPU_COUNT", 1)) return E_PARAM; t_dev = d; T("aclrtSetDevice %d", d); return OK; }
int aclrtResetDevice(int32_t d) { (void)d; return OK; }
int aclrtGetDevice(int32_t *d) { if (t_dev < 0) return 107002; *d = t_dev; return OK; }
int aclrtGetCurrentContext(void **c) { if (t_dev < 0) return 107002; *c = (void *)(uintptr_t)(0x1000 + t_dev); return OK; }
int aclrtSetCurrentContext(void *c) { t_dev = (int)((uintptr_t)c - 0x1000); return OK; }
int aclrtGetPrimaryCtxState(int32_t d, uint32_t *f, int32_t *a) { (void)d; if (f) *f = 0; *a = t_dev >= 0; return OK; }
int aclrtGetLogicDevIdByUserDevId(int32_t u, int32_t *l) { *l = u; return OK; }
int aclrtDeviceCanAccessPeer(int32_t *c, int32_t a, int32_t b) { (void)a; (void)b; *c = 1; return OK; }
int aclrtDeviceGetBareTgid(int32_t *p) { *p = getpid(); return OK; }
int aclrtGetDeviceInfo(uint32_t d, int a, int64_t *v) { (void)d; *v = a == 201 ? 48 : a == 301 ? (int64_t)mem_total() : 24; return OK; }
int aclGetDeviceCapability(uint32_t d, int i, int64_t *v) { (void)d; *v = i == 1 ? 48 : 24; return OK; }
int aclrtGetDeviceUtilizationRate(int32_t d, void *u) { (void)d; memset(u, 0, 16); return OK; }
int aclrtDeviceGetUuid(int32_t d, void *u) { memset(u, d, 16); return OK; }
int aclrtGetDeviceResLimit(int32_t d, int t, uint32_t *v) { (void)d; *v = t ? 48 : 24; return OK; }
int aclrtGetStreamResLimit(void *s, int t, uint32_t *v) { (void)s; *v = t ? 48 : 24; return OK; }
int aclrtGetResInCurrentThread(int t, uint32_t *v) { *v = t ? 48 : 24; return OK; }
int aclrtSetDeviceSatMode(int m) { (void)m; return OK; }
int aclrtGetSysParamOpt(int o, int64_t *v) { (void)o; *v = 0; return OK; }
int aclrtSetSysParamOpt(int o, int64_t v) { (void)o; (void)v; return OK; }
int aclrtCtxSetSysParamOpt(int o, int64_t v) { (void)o; (void)v; return OK; }
int aclrtSetOpExecuteTimeOut(uint32_t t) { (void)t; return OK; }
int aclrtSetOpExecuteTimeOutV2(uint64_t t, uint64_t *actual) { *actual = t; return OK; }
int aclrtSetOpWaitTimeout(uint32_t t) { (void)t; return OK; }
int aclrtPeekAtLastError(int l) { (void)l; return OK; }
int aclrtGetLastError(int l) { (void)l; return OK; }
size_t aclGetCompileoptSize(int o) { (void)o; return 64; }
int aclGetCompileopt(int o, char *v, size_t n) { (void)o; if (n) { strncpy(v, "disable", n - 1); v[n - 1] = 0; } return OK; }   /* JIT compile off: the aclnn path, as on 910B */
int aclSetCompileopt(int o, const char *v) { (void)o; (void)v; return OK; }
int aclGetCannAttribute(int a, int32_t *v) { (void)a; *v = 0; return OK; }
int aclGetCannAttributeList(const int **l, size_t *n) { static const int none; *l = &none; *n = 0; return OK; }

/* torch_npu picks operator variants by the CANN version */
static const char *version(void) { const char *v = getenv("SIM_CANN_VERSION"); return v && *v ? v : "9.1.0"; }
int aclsysGetVersionStr(char *pkg, char *out) { (void)pkg; strcpy(out, version()); return OK; }
int aclsysGetVersionNum(char *pkg, int32_t *out) { int a = 0, b = 0, c = 0; (void)pkg; sscanf(version(), "%d.%d.%d", &a, &b, &c); *out = a * 10000000 + b * 100000 + c * 1000; return OK; }
int aclsysGetCANNVersion(int pkg, char *out) { (void)pkg; memset(out, 0, 512); strcpy(out, version()); return OK; }   /* version[128], four parts of 64, reserved[128] */

/* ---- memory ---- */
/* SIM_NPU_SHAPES=1: nobody computes, so what is large is the same 64 MiB again and again, and a model of any size fits. */
#define PIECE ((size_t)64 << 20)
static void *again(size_t n) {
    static int fd = -1;
    const char *v = getenv("SIM_NPU_SHAPES");
    if (n < PIECE || !v || *v != '1') return 0;
    pthread_mutex_lock(&g_mu);
    if (fd < 0 && (fd = memfd_create("sim_npu", 0)) >= 0 && ftruncate(fd, PIECE)) { close(fd); fd = -1; }
    pthread_mutex_unlock(&g_mu);
    size_t all = 4096 + (n + PIECE) / PIECE * PIECE;
    char *at = mmap(0, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fd < 0 || at == MAP_FAILED) return 0;
    for (size_t i = 4096; i < all; i += PIECE) if (mmap(at + i, PIECE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) return 0;
    size_t *h = (size_t *)(at + 4096 - 512);
    h[1] = all; return h;
}
static int get(void **p, size_t n) {
    pthread_mutex_lock(&g_mu);
    int full = g_used + n > mem_total();
    if (!full) g_used += n;
    pthread_mutex_unlock(&g_mu);
    if (full) return E_ALLOC;
    size_t *h = again(n);
    if (!h) { if (posix_memalign((void **)&h, 512, n + 1024)) return E_ALLOC; h[1] = 0; }
    h[0] = n; *p = (char *)h + 512; return OK;
}
static int put(void *p) {
    if (!p) return OK;
    size_t *h = (size_t *)((char *)p - 512);
    pthread_mutex_lock(&g_mu); g_used -= h[0]; pthread_mutex_unlock(&g_mu);
    if (h[1]) munmap((char *)h + 512 - 4096, h[1]); else free(h);
    return OK;
}
int aclrtMalloc(void **p, size_t n, int pol) { (void)pol; T("aclrtMalloc %zu", n); return get(p, n); }
int aclrtMallocAlign32(void **p, size_t n, int pol) { (void)pol; return get(p, n); }
int aclrtFree(void *p) { return put(p); }
int aclrtMallocHost(void **p, size_t n) { return posix_memalign(p, 4096, n ? n : 1) ? E_ALLOC : OK; }
int aclrtMallocHostWithCfg(void **p, uint64_t n, void *c) { (void)c; return aclrtMallocHost(p, n); }
int aclrtFreeHost(void *p) { free(p); return OK; }
int aclrtHostRegister(void *p, uint64_t n, int t, void **d) { (void)n; (void)t; *d = p; return OK; }
int aclrtHostRegisterV2(void *p, uint64_t n, uint32_t f) { (void)p; (void)n; (void)f; return OK; }
int aclrtHostUnregister(void *p) { (void)p; return OK; }
int aclrtMemcpy(void *d, size_t m, const void *s, size_t n, int k) { (void)k; if (n > m) return E_PARAM; memmove(d, s, n); return OK; }
int sim_drain(void *stream);
int aclrtMemcpyAsync(void *d, size_t m, const void *s, size_t n, int k, void *st) { sim_drain(st); return aclrtMemcpy(d, m, s, n, k); }
int aclrtMemset(void *d, size_t m, int32_t v, size_t n) { if (n > m) return E_PARAM; memset(d, v, n); return OK; }
int aclrtMemsetAsync(void *d, size_t m, int32_t v, size_t n, void *s) { sim_drain(s); return aclrtMemset(d, m, v, n); }
int aclrtGetMemInfo(int a, size_t *f, size_t *t) { (void)a; *t = mem_total(); *f = *t - g_used; return OK; }
/* segments that grow: addresses are reserved without memory, and pieces of memory are mapped into them */
typedef struct range { struct range *next; char *at; size_t n; } range;
static range *g_reserved, *g_mapped;
static void keep(range **list, void *at, size_t n) {
    range *r = malloc(sizeof *r); r->at = at; r->n = n;
    pthread_mutex_lock(&g_mu); r->next = *list; *list = r; pthread_mutex_unlock(&g_mu);
}
static size_t forget(range **list, void *at) {
    size_t n = 0;
    pthread_mutex_lock(&g_mu);
    for (range **r = list; *r; r = &(*r)->next) if ((*r)->at == at) { range *x = *r; n = x->n; *r = x->next; free(x); break; }
    pthread_mutex_unlock(&g_mu);
    return n;
}
int aclrtReserveMemAddress(void **p, size_t n, size_t al, void *e, uint64_t f) {
    (void)al; (void)e; (void)f;
    *p = mmap(0, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*p == MAP_FAILED) return E_ALLOC;
    T("aclrtReserveMemAddress %zu", n); keep(&g_reserved, *p, n); return OK;
}
int aclrtReleaseMemAddress(void *p) { size_t n = forget(&g_reserved, p); return n && !munmap(p, n) ? OK : E_PARAM; }
int aclrtMallocPhysical(void **h, size_t n, const void *pr, uint64_t f) {
    (void)pr; (void)f;
    pthread_mutex_lock(&g_mu);
    int full = g_used + n > mem_total();
    if (!full) g_used += n;
    pthread_mutex_unlock(&g_mu);
    if (full) return E_ALLOC;
    size_t *size = malloc(sizeof *size); *size = n; *h = size; return OK;
}
int aclrtFreePhysical(void *h) { pthread_mutex_lock(&g_mu); g_used -= *(size_t *)h; pthread_mutex_unlock(&g_mu); free(h); return OK; }
int aclrtMapMem(void *p, size_t n, size_t o, void *h, uint64_t f) {
    (void)o; (void)f;
    if (n > *(size_t *)h || mprotect(p, n, PROT_READ | PROT_WRITE)) return E_PARAM;
    keep(&g_mapped, p, n); return OK;
}
int aclrtUnmapMem(void *p) {
    size_t n = forget(&g_mapped, p);
    if (!n) return E_PARAM;
    return mmap(p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED ? E_PARAM : OK;
}

/* ---- what an aclnn operator is given ---- */
typedef struct { uint64_t n; int64_t d[16], off; int dt; char *p; } tensor;
void *aclCreateTensor(const int64_t *vd, uint64_t n, int dt, const int64_t *st, int64_t off, int fmt, const int64_t *sd, uint64_t sn, void *data) {
    (void)st; (void)sd; (void)sn;
    char b[256]; int k = 0; b[0] = 0;
    for (uint64_t i = 0; i < n && k < 230; i++) k += snprintf(b + k, sizeof b - k, "%s%ld", i ? "," : "", (long)vd[i]);
    T("  tensor [%s] dtype=%d format=%d", b, dt, fmt);
    tensor *t = calloc(1, sizeof *t); t->n = n; t->dt = dt; t->p = data; t->off = off;
    for (uint64_t i = 0; i < n && i < 16; i++) t->d[i] = vd[i];
    return t;
}
void *aclCreateScalar(void *v, int dt) { (void)v; T("  scalar dtype=%d", dt); return calloc(1, 8); }
void *aclCreateIntArray(const int64_t *v, uint64_t n) {
    char b[256]; int k = 0; b[0] = 0;
    for (uint64_t i = 0; i < n && k < 230; i++) k += snprintf(b + k, sizeof b - k, "%s%ld", i ? "," : "", (long)v[i]);
    T("  ints [%s]", b); return calloc(1, 8);
}
void *aclCreateFloatArray(const float *v, uint64_t n) { (void)v; (void)n; return calloc(1, 8); }
void *aclCreateBoolArray(const _Bool *v, uint64_t n) { (void)v; (void)n; return calloc(1, 8); }
void *aclCreateTensorList(void *const *v, uint64_t n) { (void)v; T("  tensorlist n=%lu", (unsigned long)n); return calloc(1, 8); }
void *aclCreateScalarList(void *const *v, uint64_t n) { (void)v; (void)n; return calloc(1, 8); }
#define DESTROY(N) int N(void *p) { free(p); return OK; }
DESTROY(aclDestroyTensor) DESTROY(aclDestroyScalar) DESTROY(aclDestroyIntArray) DESTROY(aclDestroyFloatArray)
DESTROY(aclDestroyBoolArray) DESTROY(aclDestroyTensorList) DESTROY(aclDestroyScalarList)
int aclDestroyAclOpExecutor(void *e) { (void)e; return OK; }

/* fills of fresh (contiguous) tensors, which torch_npu makes in C++, for instance in barrier() */
static int fill(const tensor *t, int one) {
    static const unsigned char width[] = {4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1};
    size_t n = 1, w = t->dt < 13 ? width[t->dt] : t->dt == 27 ? 2 : 0;
    if (!w) return E_PARAM;
    for (uint64_t i = 0; i < t->n; i++) n *= t->d[i];
    float f = 1; double d = 1; uint16_t h = t->dt == 1 ? 0x3c00 : t->dt == 27 ? 0x3f80 : 1; uint64_t u = 1;
    const void *v = t->dt == 0 ? (void *)&f : t->dt == 11 ? (void *)&d : w == 2 ? (void *)&h : (void *)&u;
    char *to = t->p + t->off * w;
    if (!one) memset(to, 0, n * w);
    else for (size_t i = 0; i < n; i++) memcpy(to + i * w, v, w);
    return OK;
}
int aclnnInplaceZeroGetWorkspaceSize(const tensor *t, uint64_t *ws, void **ex) { *ws = 0; *ex = 0; return fill(t, 0); }
int aclnnInplaceOneGetWorkspaceSize(const tensor *t, uint64_t *ws, void **ex) { *ws = 0; *ex = 0; return fill(t, 1); }

/* the one aclnn function whose answer torch_npu needs: what shape a private format takes */
int aclnnNpuFormatCastCalculateSizeAndFormat(const void *src, int fmt, int extra, int64_t **shape, uint64_t *n, int *actual) {
    const tensor *t = src; (void)extra;
    int64_t c0 = t->dt == 2 || t->dt == 4 ? 32 : t->dt == 3 ? 8 : 16;        /* int8 and uint8; int32 (packed int4) */
    int nz = fmt == 29 && t->n >= 2;
    *n = t->n + (nz ? 2 : 0); *actual = fmt; *shape = malloc(sizeof(int64_t) * (*n + 1));
    memcpy(*shape, t->d, sizeof(int64_t) * t->n);
    if (nz) {
        int64_t a = t->d[t->n - 2], b = t->d[t->n - 1], *o = *shape + t->n - 2;
        o[0] = (b + c0 - 1) / c0; o[1] = (a + 15) / 16; o[2] = 16; o[3] = c0;
    }
    return OK;
}

/* ---- older (aclop) operators: a descriptor is a real allocation, the run is a no-op ---- */
void *aclCreateTensorDesc(int dt, int n, const int64_t *d, int f) { (void)dt; (void)n; (void)d; (void)f; return calloc(1, 64); }
DESTROY(aclDestroyTensorDesc)
void *aclCreateDataBuffer(void *p, size_t n) { (void)p; (void)n; return calloc(1, 64); }
DESTROY(aclDestroyDataBuffer)
void *aclopCreateAttr(void) { return calloc(1, 64); }
void aclopDestroyAttr(const void *a) { free((void *)a); }
int aclopCompileAndExecute(const char *op, ...) { return cann_operator(op); }
int aclopCompileAndExecuteV2(const char *op, ...) { return cann_operator(op); }

/* ---- the safe-string helpers some CANN libraries export ---- */
int snprintf_s(char *d, size_t m, size_t c, const char *f, ...) { (void)c; va_list a; va_start(a, f); int r = vsnprintf(d, m, f, a); va_end(a); return r; }
int vsnprintf_s(char *d, size_t m, size_t c, const char *f, va_list a) { (void)c; return vsnprintf(d, m, f, a); }
int strcpy_s(char *d, size_t m, const char *s) { size_t n = strlen(s); if (n >= m) return 34; memcpy(d, s, n + 1); return OK; }
