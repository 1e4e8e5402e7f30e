/* test_io.c - reading, listing and atomic writing, with every call failing in turn. */
#include "faulty_io.h"
#include "read_file.h"

#include <sys/stat.h>

static const char OLD[] = "the old contents";
static const char NEW[] = "the new contents, which are longer than the old ones";

static bool contains(const char *path, const char *text)
{
    te_io_error error;
    char *data;
    size_t size;
    if (read_file(&te_io_posix, &te_mem_libc, path, &data, &size, &error) != TE_OK) return false;
    bool same = size == strlen(text) && memcmp(data, text, size + 1) == 0;
    te_mem_free(&te_mem_libc, data, size + 1);
    return same;
}

static void test_round_trip(void)
{
    faulty_io f;
    faulty_mem m;
    te_io_error error;
    faulty_io_init(&f);
    faulty_mem_init(&m);
    for (int stutter = 0; stutter < 2; stutter++) {
        f.stutter = stutter;
        CHECK(te_io_write_file(&f.io, &m.mem, "file", NEW, strlen(NEW), &error) == TE_OK);
        char *data = NULL;
        size_t size = 0;
        CHECK(read_file(&f.io, &m.mem, "file", &data, &size, &error) == TE_OK);
        CHECK(size == strlen(NEW) && data && memcmp(data, NEW, size + 1) == 0);
        te_mem_free(&m.mem, data, size + 1);
    }
    CHECK(te_io_write_file(&f.io, &m.mem, "empty", NULL, 0, &error) == TE_OK && contains("empty", ""));
    CHECK(atomic_load(&f.open_files) == 0 && m.bytes == 0);
    CHECK(test_folder_count(".", ".tmp", false) == 0);
}

/* Whichever call fails: old file or new file, nothing else in the folder, nothing left open. */
static void test_write_failures(void)
{
    faulty_io f;
    faulty_mem m;
    te_io_error error;
    faulty_io_init(&f);
    faulty_mem_init(&m);
    f.code = -ENOSPC;
    long n = 1;
    for (bool done = false; !done && n < 100; n++) {
        test_file_write("target", OLD, strlen(OLD));
        faulty_io_arm(&f, n);
        te_status status = te_io_write_file(&f.io, &m.mem, "target", NEW, strlen(NEW), &error);
        bool replaced = contains("target", NEW);
        CHECK(replaced || contains("target", OLD));
        if (status == TE_OK) {
            CHECK(replaced);
        } else {
            CHECK(status == TE_ERROR_IO && strstr(error.message, "target") && strstr(error.message, "No space"));
            CHECK(!replaced || strstr(error.message, "folder cannot be flushed"));
        }
        CHECK(test_folder_count(".", ".tmp", true) == 0);
        CHECK(atomic_load(&f.open_files) == 0 && m.bytes == 0);
        done = atomic_load(&f.calls) < n;
    }
    CHECK_MSG(n > 7, "only %ld calls", n);
    faulty_io_arm(&f, 0);
    m.fail_at = m.calls + 1;
    CHECK(te_io_write_file(&f.io, &m.mem, "target", NEW, strlen(NEW), &error) == TE_ERROR_MEMORY);
}

static int mode_of(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 ? (int)(info.st_mode & 07777) : -1;
}

static void test_write_keeps_permissions(void)
{
    static const int modes[] = {0600, 0640, 0444, 0666, 0644};
    te_io_error error;
    mode_t mask = umask(022);
    CHECK(te_io_write_file(&te_io_posix, &te_mem_libc, "private", OLD, strlen(OLD), &error) == TE_OK);
    CHECK_MSG(mode_of("private") == 0644, "%o", (unsigned)mode_of("private")); /* there was none */
    CHECK(symlink("private", "also-private") == 0);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        CHECK(chmod("private", (mode_t)modes[i]) == 0);
        te_io_writer w;
        CHECK(te_io_writer_open(&w, &te_io_posix, &te_mem_libc, "also-private", &error) == TE_OK);
        CHECK_MSG(mode_of(w.temp) == modes[i], "%o instead of %o", (unsigned)mode_of(w.temp), (unsigned)modes[i]);
        CHECK(te_io_writer_write(&w, NEW, strlen(NEW), &error) == TE_OK);
        CHECK(te_io_writer_commit(&w, &error) == TE_OK && contains("private", NEW));
        CHECK_MSG(mode_of("private") == modes[i], "%o instead of %o", (unsigned)mode_of("private"), (unsigned)modes[i]);
    }
    umask(mask);
}

static void test_write_refusals(void)
{
    te_io_error error;
    mkdir("folder", 0777);
    CHECK(te_io_write_file(&te_io_posix, &te_mem_libc, "folder", OLD, 3, &error) == TE_ERROR_IO);
    CHECK(te_io_write_file(&te_io_posix, &te_mem_libc, "folder/", OLD, 3, &error) == TE_ERROR_ARGUMENT);
    CHECK(te_io_write_file(&te_io_posix, &te_mem_libc, "", OLD, 3, &error) == TE_ERROR_ARGUMENT);
    CHECK(te_io_write_file(&te_io_posix, &te_mem_libc, "absent/file", OLD, 3, &error) == TE_ERROR_IO);
    CHECK(strstr(error.message, "absent/file: ") == error.message);
    CHECK(test_folder_count(".", ".tmp", false) == 0);
    char name[300];
    memset(name, 'n', sizeof name);
    name[255] = '\0'; /* the longest name there is */
    CHECK(te_io_write_file(&te_io_posix, &te_mem_libc, name, OLD, strlen(OLD), &error) == TE_OK && contains(name, OLD));
}

static void test_write_through_links(void)
{
    static const char *const links[][2] = {
        {"target", "near"}, {"../target", "links/back"}, {"away/../../target", "links/far"}, {"near", "chain"},
        {"loop2", "loop1"}, {"loop1", "loop2"}, {"made", "dangling"}, {"absent/made", "astray"}, {"links", "place"}};
    te_io_error error;
    char text[64];
    mkdir("links", 0777);
    mkdir("links/away", 0777);
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) CHECK(symlink(links[i][0], links[i][1]) == 0);
    static const char *const whole[] = {"near", "links/far", "chain", "links/back"};
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
        test_file_write("target", OLD, strlen(OLD));
        CHECK(te_io_write_file(&te_io_posix, &te_mem_libc, whole[i], NEW, strlen(NEW), &error) == TE_OK);
        CHECK(contains("target", NEW) && readlink(whole[i], text, sizeof text) > 0);
    }
    CHECK(te_io_write_file(&te_io_posix, &te_mem_libc, "dangling", NEW, strlen(NEW), &error) == TE_OK);
    CHECK(contains("made", NEW) && readlink("dangling", text, sizeof text) > 0);
    static const char *const refused[][2] = {
        {"loop1", "loop1: cannot find what to write: Too many levels"}, {"astray", "absent/made: "},
        {"place", "links: "}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        CHECK(te_io_write_file(&te_io_posix, &te_mem_libc, refused[i][0], NEW, strlen(NEW), &error) == TE_ERROR_IO);
        CHECK_MSG(strstr(error.message, refused[i][1]) == error.message, "%s", error.message);
        CHECK(readlink(refused[i][0], text, sizeof text) > 0);
    }
    CHECK(test_folder_count(".", ".tmp", false) == 0 && test_folder_count("links", ".tmp", false) == 0);
    test_folder_count("links", "", true);
}

static void test_read_failures(void)
{
    faulty_io f;
    faulty_mem m;
    te_io_error error;
    char *data;
    size_t size;
    faulty_io_init(&f);
    faulty_mem_init(&m);
    test_file_write("file", OLD, strlen(OLD));
    for (long n = 1; n <= 3; n++) { /* open, size, pread */
        faulty_io_arm(&f, n);
        CHECK(read_file(&f.io, &m.mem, "file", &data, &size, &error) == TE_ERROR_IO);
        CHECK(strstr(error.message, "file: ") == error.message && strstr(error.message, "Input/output error"));
    }
    faulty_io_arm(&f, 0);
    m.fail_at = m.calls + 1;
    CHECK(read_file(&f.io, &m.mem, "file", &data, &size, &error) == TE_ERROR_MEMORY);
    CHECK(read_file(&f.io, &m.mem, "absent", &data, &size, &error) == TE_ERROR_IO);
    CHECK(read_file(&f.io, &m.mem, ".", &data, &size, &error) == TE_ERROR_IO);
    CHECK(strstr(error.message, "directory"));
    CHECK(mkfifo("pipe", 0666) == 0);
    CHECK(read_file(&f.io, &m.mem, "pipe", &data, &size, &error) == TE_ERROR_IO);

    int fd;
    int64_t length;
    char buffer[64];
    CHECK(te_io_open_read(&f.io, "file", &fd, &length, &error) == TE_OK && length == (int64_t)strlen(OLD));
    CHECK(te_io_read(&f.io, fd, "file", buffer, 5, 4, &error) == TE_OK && memcmp(buffer, OLD + 4, 5) == 0);
    CHECK(te_io_read(&f.io, fd, "file", buffer, 20, 4, &error) == TE_ERROR_IO);
    CHECK_MSG(strcmp(error.message, "file: offset 16: the file ends here, 8 more bytes are needed") == 0, "%s",
              error.message);
    f.io.close(f.io.user, fd);
    CHECK(atomic_load(&f.open_files) == 0 && m.bytes == 0);
}

static void test_folders(void)
{
    faulty_mem m;
    te_io_error error;
    te_io_names names;
    faulty_mem_init(&m);
    CHECK(te_io_make_folder(&te_io_posix, &m.mem, "a/b//c/", &error) == TE_OK);
    CHECK(te_io_make_folder(&te_io_posix, &m.mem, "a/b/c", &error) == TE_OK);
    CHECK(te_io_make_folder(&te_io_posix, &m.mem, "/", &error) == TE_OK);
    CHECK(te_io_make_folder(&te_io_posix, &m.mem, "", &error) == TE_ERROR_IO);
    CHECK(te_io_is_folder(&te_io_posix, "a/b/c") && !te_io_is_folder(&te_io_posix, "a/b/d"));
    test_file_write("a/b/file", OLD, 1);
    CHECK(te_io_make_folder(&te_io_posix, &m.mem, "a/b/file", &error) == TE_ERROR_IO);
    CHECK(te_io_make_folder(&te_io_posix, &m.mem, "a/b/file/d", &error) == TE_ERROR_IO);
    test_file_write("a/b/a", OLD, 1);
    CHECK(te_io_list(&te_io_posix, &m.mem, "a/b", &names, &error) == TE_OK && names.count == 3);
    CHECK(names.count == 3 && !strcmp(names.names[0], "a") && !strcmp(names.names[1], "c") &&
          !strcmp(names.names[2], "file"));
    te_io_names_free(&names);
    CHECK(te_io_list(&te_io_posix, &m.mem, "a/x", &names, &error) == TE_ERROR_IO && names.count == 0);
    for (long n = 1; n <= 4; n++) {
        m.calls = 0;
        m.fail_at = n;
        CHECK(te_io_list(&te_io_posix, &m.mem, "a/b", &names, &error) == TE_ERROR_MEMORY && names.count == 0);
        CHECK(m.bytes == 0);
    }
    test_folder_count("a/b", "", true);
    test_folder_count("a", "", true);
}

static void test_messages(void)
{
    te_io_error error;
    char path[1000];
    memset(path, 'p', sizeof path);
    memcpy(path + sizeof path - 9, "/end.bin", 9);
    te_io_fail(&error, TE_ERROR_IO, path, "offset %d: bad \x1b[31m name", 12);
    CHECK(strstr(error.message, "...pp") == error.message && strstr(error.message, "/end.bin: offset 12: bad ?[31m"));
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    te_io_fail_errno(&error, -EIO, "p", "%s", path);
    CHECK(strlen(error.message) == sizeof error.message - 1);
    CHECK(te_io_fail_errno(&error, -ENOMEM, NULL, "reading") == TE_ERROR_MEMORY);
    CHECK(strstr(error.message, "reading: ") == error.message);
}

int main(void)
{
    char folder[512];
    test_folder_enter(folder, sizeof folder, "io");
    test_round_trip();
    test_write_failures();
    test_write_keeps_permissions();
    test_write_refusals();
    test_write_through_links();
    test_read_failures();
    test_folders();
    test_messages();
    test_folder_leave(folder);
    return TEST_END();
}
