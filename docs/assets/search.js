// A flag can be searched as it is typed: the search reads a leading dash as "without this word".
for (const event of ["input", "keyup", "focus"]) {
  document.addEventListener(
    event,
    ({ target }) => {
      if (target instanceof HTMLInputElement && target.matches(".md-search__input")) {
        const words = target.value.replace(/(^|\s)-+(?=\w)/g, "$1");
        if (words !== target.value) target.value = words;
      }
    },
    true,
  );
}
