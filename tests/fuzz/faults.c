/* Loaded before libc (LD_PRELOAD): the nth change of a folder fails, or is the last thing that the process does.

   What is counted are calls that change what is on disk below the folder, from whatever library: those that make, grow,
   rename, link, sync or remove a file. Reading is left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { NEVER, ONCE_EIO, FULL, KILLED, TORN };
enum due { GOES_ON, FAILS, LAST };

static char folder[PATH_MAX];
static atomic_long seen;
static long nth;
static atomic_int how = NEVER;

void faults_arm(const char *below, long number, int kind) {
    snprintf(folder, sizeof folder, "%s/", below);
    seen = 0;
    nth = number;
    how = kind;
}

long faults_seen(void) { return seen; }

static void end(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int is_below(const char *path) { return strncmp(path, folder, strlen(folder)) == 0; }

static int below_fd(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 2);
    if (length < 0) return 0;
    strcpy(path + length, "/");  /* the folder itself is synced, too */
    return is_below(path);
}

static int below(int at, const char *path) {
    char here[PATH_MAX];
    if (path[0] == '/') return is_below(path);
    if (at != AT_FDCWD) return below_fd(at);
    return getcwd(here, sizeof here - 1) && is_below(strcat(here, "/"));
}

static enum due due(int counts, int grows) {
    if (!folder[0] || !counts) return GOES_ON;
    long number = atomic_fetch_add(&seen, 1) + 1;
    if (how == FULL && number >= nth && grows) return errno = ENOSPC, FAILS;
    if (number != nth) return GOES_ON;
    if (how == ONCE_EIO) return errno = EIO, FAILS;
    if (how == KILLED) end();
    return how == TORN ? LAST : GOES_ON;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define CALL(type, name, parameters, arguments, counts, grows) \
    type name parameters { \
        int saved = errno; \
        enum due is = due(counts, grows); \
        if (is == FAILS) return -1; \
        REAL(name); \
        errno = saved; \
        type result = real arguments; \
        if (is == LAST) end(); \
        return result; \
    }
#define OPEN(name, parameters, arguments, counts) \
    int name parameters { \
        int mode = 0; \
        if (flags & (O_CREAT | __O_TMPFILE)) { \
            va_list more; \
            va_start(more, flags); \
            mode = va_arg(more, int); \
            va_end(more); \
        } \
        enum due is = due((flags & (O_CREAT | O_TRUNC)) && (counts), 1); \
        if (is == FAILS) return -1; \
        REAL(name); \
        int result = real arguments; \
        if (is == LAST) end(); \
        return result; \
    }
/* A torn one is half of it. */
#define WRITE(name, parameters, arguments) \
    ssize_t name parameters { \
        enum due is = due(below_fd(fd), 1); \
        if (is == FAILS) return -1; \
        if (is == LAST) size /= 2; \
        REAL(name); \
        ssize_t result = size || is != LAST ? real arguments : 0; \
        if (is == LAST) end(); \
        return result; \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode), below(AT_FDCWD, path))
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), below(AT_FDCWD, path))
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), below(at, path))
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), below(at, path))
WRITE(write, (int fd, const void *data, size_t size), (fd, data, size))
WRITE(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
WRITE(sendfile, (int fd, int from, off_t *at, size_t size), (fd, from, at, size))
WRITE(sendfile64, (int fd, int from, off64_t *at, size_t size), (fd, from, at, size))
WRITE(copy_file_range, (int from, off64_t *read, int fd, off64_t *at, size_t size, unsigned flags),
      (from, read, fd, at, size, flags))
CALL(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count), below_fd(fd), 1)
CALL(int, ftruncate, (int fd, off_t size), (fd, size), below_fd(fd), 1)
CALL(int, ftruncate64, (int fd, off64_t size), (fd, size), below_fd(fd), 1)
CALL(int, fsync, (int fd), (fd), below_fd(fd), 0)
CALL(int, fdatasync, (int fd), (fd), below_fd(fd), 0)
CALL(int, rename, (const char *old, const char *new), (old, new), below(AT_FDCWD, new), 0)
CALL(int, renameat, (int at, const char *old, int to, const char *new), (at, old, to, new), below(to, new), 0)
CALL(int, renameat2, (int at, const char *old, int to, const char *new, unsigned flags), (at, old, to, new, flags),
     below(to, new), 0)
CALL(int, link, (const char *old, const char *new), (old, new), below(AT_FDCWD, new), 1)
CALL(int, linkat, (int at, const char *old, int to, const char *new, int flags), (at, old, to, new, flags),
     below(to, new), 1)
CALL(int, mkdir, (const char *path, mode_t mode), (path, mode), below(AT_FDCWD, path), 1)
CALL(int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), below(at, path), 1)
CALL(int, unlink, (const char *path), (path), below(AT_FDCWD, path), 0)
CALL(int, unlinkat, (int at, const char *path, int flags), (at, path, flags), below(at, path), 0)
CALL(int, rmdir, (const char *path), (path), below(AT_FDCWD, path), 0)
CALL(int, chmod, (const char *path, mode_t mode), (path, mode), below(AT_FDCWD, path), 0)
