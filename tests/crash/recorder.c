/* Records what a process does to the files below one directory, for simulated power cuts.
 *
 * Loaded by LD_PRELOAD. KVSTORE_RECORD_ROOT is the directory, KVSTORE_RECORD_TRACE the file that
 * gets the records. Calls on other files pass through. One lock is held over each call and its
 * record, so records stand in the order in which the calls took effect. Nothing is synced for
 * real: a sync is only recorded, which is what makes a trace cheap.
 *
 *     record := | op u8 | path u16 | second u16 | offset u64 | size u64 | path | second | data |
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES_MAX 65536

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char *paths[FILES_MAX]; /* of each descriptor that is below the root */
static ino_t inodes[FILES_MAX];
static char root[PATH_MAX];
static int trace = -1;

__attribute__((constructor)) static void begin(void) {
    const char *directory = getenv("KVSTORE_RECORD_ROOT"), *file = getenv("KVSTORE_RECORD_TRACE");
    if (!directory || !file) return;
    snprintf(root, sizeof root, "%s/", directory);
    trace = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

static ino_t inode_of(int file) {
    struct stat found;
    return syscall(SYS_fstat, file, &found) ? 0 : found.st_ino;
}

/* fclose closes out of our sight, and the descriptor may be another file's by now. */
static const char *path_of(int file) {
    if (trace < 0 || file < 0 || file >= FILES_MAX || !paths[file]) return NULL;
    return inode_of(file) == inodes[file] ? paths[file] : NULL;
}

/* The path below the root, or NULL. */
static const char *below(int directory, const char *path, char *absolute) {
    if (trace < 0 || !path) return NULL;
    if (path[0] == '/') {
        snprintf(absolute, PATH_MAX, "%s", path);
    } else if (directory == AT_FDCWD) {
        char here[PATH_MAX];
        if (!getcwd(here, sizeof here)) return NULL;
        snprintf(absolute, PATH_MAX, "%s/%s", here, path);
    } else {
        const char *parent = path_of(directory);
        if (!parent) return NULL;
        snprintf(absolute, PATH_MAX, "%s%s/%s", root, parent, path);
    }
    size_t length = strlen(root);
    if (!strncmp(absolute, root, length)) return absolute + length;
    /* The root itself, which has no slash behind it. */
    return strlen(absolute) == length - 1 && !strncmp(absolute, root, length - 1) ? "" : NULL;
}

static void record(char op, const char *path, const char *second, uint64_t offset,
                   const struct iovec *data, int count, size_t size) {
    char head[21];
    uint16_t length = strlen(path), other = second ? strlen(second) : 0;
    uint64_t bytes = size;
    head[0] = op;
    memcpy(head + 1, &length, 2);
    memcpy(head + 3, &other, 2);
    memcpy(head + 5, &offset, 8);
    memcpy(head + 13, &bytes, 8);
    syscall(SYS_write, trace, head, sizeof head);
    syscall(SYS_write, trace, path, length);
    if (other) syscall(SYS_write, trace, second, other);
    for (int i = 0; i < count && size; i++) {
        size_t part = data[i].iov_len < size ? data[i].iov_len : size;
        syscall(SYS_write, trace, data[i].iov_base, part);
        size -= part;
    }
}

static void note(char op, const char *path, const char *second, uint64_t offset) {
    record(op, path, second, offset, NULL, 0, 0);
}

static int opened(int directory, const char *path, int flags, mode_t mode) {
    char absolute[PATH_MAX];
    const char *found = below(directory, path, absolute);
    if (!found) return syscall(SYS_openat, directory, path, flags, mode);
    pthread_mutex_lock(&lock);
    int existed = !syscall(SYS_faccessat, directory, path, F_OK);
    int file = syscall(SYS_openat, directory, path, flags, mode);
    int error = errno;
    if (file >= 0 && file < FILES_MAX) {
        free(paths[file]);
        paths[file] = strdup(found);
        inodes[file] = inode_of(file);
        if ((flags & O_CREAT) && !existed) note('c', found, NULL, 0);
        if ((flags & O_TRUNC) && existed) note('t', found, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return file;
}

#define OPEN(name, parameters, directory)                                                     \
    int name parameters {                                                                      \
        va_list rest;                                                                          \
        va_start(rest, flags);                                                                 \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                \
        va_end(rest);                                                                          \
        return opened(directory, path, flags, mode);                                           \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD)
OPEN(openat, (int directory, const char *path, int flags, ...), directory)
OPEN(openat64, (int directory, const char *path, int flags, ...), directory)

int close(int file) {
    if (!path_of(file)) return syscall(SYS_close, file);
    pthread_mutex_lock(&lock);
    free(paths[file]);
    paths[file] = NULL;
    int result = syscall(SYS_close, file);
    pthread_mutex_unlock(&lock);
    return result;
}

/* At the end of the file where `offset` is negative: all descriptors here append or began empty. */
static ssize_t written(int file, const struct iovec *data, int count, off_t offset) {
    pthread_mutex_lock(&lock);
    struct stat before;
    int flags = fcntl(file, F_GETFL);
    off_t at = offset;
    if (offset < 0) {
        fstat(file, &before);
        at = flags & O_APPEND ? before.st_size : lseek(file, 0, SEEK_CUR);
    }
    ssize_t size = offset < 0 ? syscall(SYS_writev, file, data, count)
                              : syscall(SYS_pwritev, file, data, count, offset, 0);
    int error = errno;
    if (size > 0) record('w', paths[file], NULL, at, data, count, size);
    pthread_mutex_unlock(&lock);
    errno = error;
    return size;
}

ssize_t write(int file, const void *data, size_t size) {
    struct iovec whole = {(void *)data, size};
    return path_of(file) ? written(file, &whole, 1, -1) : syscall(SYS_write, file, data, size);
}
ssize_t writev(int file, const struct iovec *data, int count) {
    return path_of(file) ? written(file, data, count, -1) : syscall(SYS_writev, file, data, count);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) {
    struct iovec whole = {(void *)data, size};
    return path_of(file) ? written(file, &whole, 1, offset)
                         : syscall(SYS_pwrite64, file, data, size, offset);
}
ssize_t pwrite64(int file, const void *data, size_t size, off_t offset) {
    return pwrite(file, data, size, offset);
}
ssize_t sendfile(int target, int source, off_t *offset, size_t size) {
    if (path_of(target)) return errno = ENOTSOCK, -1; /* callers write instead */
    return syscall(SYS_sendfile, target, source, offset, size);
}
ssize_t copy_file_range(int source, off_t *from, int target, off_t *to, size_t size, unsigned how) {
    if (path_of(target)) return errno = EXDEV, -1;
    return syscall(SYS_copy_file_range, source, from, target, to, size, how);
}

int ftruncate(int file, off_t size) {
    if (!path_of(file)) return syscall(SYS_ftruncate, file, size);
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_ftruncate, file, size);
    if (!result) note('t', paths[file], NULL, size);
    pthread_mutex_unlock(&lock);
    return result;
}
int ftruncate64(int file, off_t size) { return ftruncate(file, size); }

int fallocate(int file, int mode, off_t offset, off_t size) {
    /* Of space that is kept for later nothing shows; whatever else is done elsewhere. */
    if (path_of(file) && !(mode & FALLOC_FL_KEEP_SIZE)) return errno = EOPNOTSUPP, -1;
    return syscall(SYS_fallocate, file, mode, offset, size);
}
int fallocate64(int file, int mode, off_t offset, off_t size) {
    return fallocate(file, mode, offset, size);
}

static int synced(int file, long call) {
    if (!path_of(file)) return syscall(call, file);
    pthread_mutex_lock(&lock);
    note('s', paths[file], NULL, 0);
    pthread_mutex_unlock(&lock);
    return 0;
}
int fsync(int file) { return synced(file, SYS_fsync); }
int fdatasync(int file) { return synced(file, SYS_fdatasync); }

/* A call on one name or two: recorded if it succeeds and a name is below the root. */
#define NAMES(op, from_directory, from, to_directory, to, call)                               \
    do {                                                                                       \
        char one[PATH_MAX], two[PATH_MAX];                                                     \
        const char *first = below(from_directory, from, one);                                  \
        const char *second = (to) ? below(to_directory, to, two) : NULL;                       \
        if (!first && !second) return call;                                                    \
        pthread_mutex_lock(&lock);                                                             \
        int result = call, error = errno;                                                      \
        if (!result) note(op, first ? first : "", second, 0);                                  \
        pthread_mutex_unlock(&lock);                                                           \
        errno = error;                                                                         \
        return result;                                                                         \
    } while (0)

/* Descriptors go on by the new name. */
static int renamed(int a, const char *from, int b, const char *to, unsigned flags) {
    int result = syscall(SYS_renameat2, a, from, b, to, flags), error = errno;
    char one[PATH_MAX], two[PATH_MAX], longer[PATH_MAX];
    const char *first = below(a, from, one), *second = below(b, to, two);
    for (int file = 0; !result && first && second && file < FILES_MAX; file++) {
        size_t length = strlen(first);
        char *path = paths[file];
        if (!path || strncmp(path, first, length) || (path[length] && path[length] != '/')) continue;
        snprintf(longer, sizeof longer, "%s%s", second, path + length);
        free(path);
        paths[file] = strdup(longer);
    }
    errno = error;
    return result;
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    NAMES('r', a, from, b, to, renamed(a, from, b, to, flags));
}
int renameat(int a, const char *from, int b, const char *to) { return renameat2(a, from, b, to, 0); }
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int a, const char *from, int b, const char *to, int flags) {
    NAMES('l', a, from, b, to, (int)syscall(SYS_linkat, a, from, b, to, flags));
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }
int unlinkat(int directory, const char *path, int flags) {
    NAMES('u', directory, path, 0, (const char *)NULL,
          (int)syscall(SYS_unlinkat, directory, path, flags));
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int mkdirat(int directory, const char *path, mode_t mode) {
    NAMES('m', directory, path, 0, (const char *)NULL,
          (int)syscall(SYS_mkdirat, directory, path, mode));
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
