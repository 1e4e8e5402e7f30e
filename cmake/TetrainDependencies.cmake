# What tetrain links: LuaJIT, OpenMP, jansson, PCRE2, utf8proc, threads; oneDNN where wanted.
find_package(PkgConfig REQUIRED)
pkg_check_modules(LUAJIT REQUIRED IMPORTED_TARGET luajit)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS C)

# Line editing at the prompt, in the executable alone; without it the prompt is a plain one.
find_path(EDIT_INCLUDE_DIR histedit.h)
find_library(EDIT_LIBRARY edit)

if(TE_WITH_ONEDNN)
  find_path(DNNL_INCLUDE_DIR dnnl.h REQUIRED)
  find_library(DNNL_LIBRARY dnnl REQUIRED)
  add_library(te_dnnl INTERFACE)
  target_include_directories(te_dnnl SYSTEM INTERFACE ${DNNL_INCLUDE_DIR})
  target_link_libraries(te_dnnl INTERFACE ${DNNL_LIBRARY})
  target_compile_definitions(te_dnnl INTERFACE TE_WITH_ONEDNN=1)
endif()
